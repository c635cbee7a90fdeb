"""Any elementwise torch optimizer, and those of whole matrices, run on the pieces that this rank owns.

The user's optimizer object stays what it is: same instance, same `param_groups` with the module's own parameters, same
hyper-parameter dicts (so schedulers work). Only while `step()` runs does each group list this rank's pieces instead:
flat fp32 views into the master buffers, with flat views of the reduced gradients. An optimizer of whole matrices
(`matrix_optimizers`) gets these in their shape: the layout lets each lie in one rank's slice (`fsdp.layout`). The
public step hooks of `torch.optim.Optimizer` do the exchange, so it does not matter who calls `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.dtensor import TensorPart
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import ShardStorage, split_pieces
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector
from zero_strategy.ops.library import lacks_kernels
from zero_strategy.optim.fused import FusedOptimizer, Segment, UpdateRule, rule_in_memory
from zero_strategy.optim.grad_norm import OwnGradients, Shard
from zero_strategy.optim.lbfgs import DistributedLBFGS, divided, joined, lbfgs_of
from zero_strategy.optim.muon import (
    MOMENTUM,
    Matrix,
    MuonAdamW,
    Orthogonaliser,
    change,
    direction,
    muon_groups,
)
from zero_strategy.optim.offloaded import OffloadedStates, OwnSteps, as_tensor, rule_for_parts, trial_state
from zero_strategy.optim.optimizer_checks import (
    check_elementwise,
    check_matrices,
    is_elementwise,
    is_matrix_optimizer,
    reason_against,
)
from zero_strategy.optim.state_book import StateBook, Unknown
from zero_strategy.optim.state_mapping import EditLog, StateMapping
from zero_strategy.optim.streamed import Update
from zero_strategy.runtime.nested_state import flattened


class ShardedOptimizer:
    """The tie between one torch optimizer and a sharded model.

    Args:
        optimizer: The optimizer over parameters of `model`; state that it has already is divided.
        model: The sharded model.
        declines: Asked when a step's gradients are reduced, on all ranks: whether it is not to be taken.

    Attributes:
        optimizer: The user's object.
        gradients: Of its parameters.
        edits: What the user has done to `optimizer.state`.
        skip_next: Leave parameters and state alone in the next `step()` (agreed by all ranks).
        skipped: Whether the last `step()` did.
        stopped_by: The exception, in words, that ended the last update of values half-way.

    Raises:
        TypeError: If the optimizer is neither elementwise nor Muon.
        ValueError: If it holds a parameter that is not the model's, or a divided one where it needs whole matrices;
            names it.
    """

    def __init__(self, optimizer: Optimizer, model: ShardedModel, declines: Callable[[ShardedOptimizer], bool]) -> None:
        declared = model.config.elementwise_optimizers
        divided, offloaded = model.placement.shard_optimizer, model.optimizer_store is not None
        self._orthogonaliser: Orthogonaliser | None = None
        self._lbfgs = lbfgs_of(optimizer, model)
        self._of_matrices = is_matrix_optimizer(optimizer, model.config.matrix_optimizers)
        if muon_groups(optimizer) and (offloaded or (divided and not self._of_matrices)):
            self._orthogonaliser, self._of_matrices = Orthogonaliser(model), False
        elif not self._of_matrices and not muon_groups(optimizer) and self._lbfgs is None:
            check_elementwise(optimizer, declared, whole=not divided and model.mesh.tensor.size == 1)
        # In pieces it is known, declared, or was tried just now.
        found = divided and not self._of_matrices and self._orthogonaliser is None and self._lbfgs is None
        found = found or (model.optimizer_store is not None and is_elementwise(optimizer, declared))
        self._elementwise = [*declared, *([type(optimizer).__name__] if found else [])]
        if isinstance(optimizer, FusedOptimizer) and not model.config.precision.master_weights:
            raise ValueError(
                f"{type(optimizer).__name__} keeps float32 master weights, which precision.master_weights=False rules "
                "out: remove that setting, or use the torch.optim class"
            )
        self.optimizer, self.model = optimizer, model
        self._begins_with = trial_state(optimizer)
        self.skip_next = self.skipped = self._fused = self._evaluating = False
        self._declines = declines
        self._pieces: dict[int, tuple[nn.Parameter, Piece, ShardStorage]] = {}
        self._whole: list[list[nn.Parameter]] | None = None
        self._stepped: list[ParameterBucket] = []
        self._recorded: list[ParameterBucket] = []
        self._stepped_parameters: list[nn.Parameter] = []
        self._updates: list[Update] = []
        self.stopped_by = ""
        self._nothing: dict[torch.dtype, Tensor] = {}
        self.edits = EditLog()
        self._book = StateBook(self, self._form)
        self._mapping = StateMapping(self)
        self._in_steps = optimizer.state
        self._shown = self._detached = False
        self.gradients = OwnGradients(model, self.parameters)
        self._check_groups()
        self._offloaded: OffloadedStates | None = None
        if model.optimizer_store is not None:
            rule, store = self._rule(), model.optimizer_store
            self._offloaded = OffloadedStates(optimizer, rule, model, store)
        self._divide_existing_state()
        self._show_mapping()
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]

    # ---- parameters and pieces ----

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module parameters of all groups, in group order."""
        groups = self._whole or [group["params"] for group in self.optimizer.param_groups]
        for group in groups:
            yield from group

    def _check_groups(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if self.model.place(parameter) is None:
                    raise ValueError(
                        f"parameter {index} of param group {number} of {type(self.optimizer).__name__}, shape "
                        f"{tuple(parameter.shape)}, is not a parameter of the sharded module. Build the optimizer from "
                        "that module's parameters() (not from a copy, and not before the module was moved)."
                    )
        if self._of_matrices or muon_groups(self.optimizer):
            check_matrices(self.optimizer, self.model, whole=self._of_matrices)

    def piece(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This rank's part of `parameter` as the optimizer sees it, flat and fp32 where a master copy is kept."""
        known = self._pieces.get(id(parameter))
        place = self.model.place(parameter)
        assert place is not None
        bucket, index = place
        if known is not None and known[2] is bucket.master:
            return known[0]
        found = bucket.piece_of.get(index)
        if found is None:
            return None
        shape = bucket.layout.segments[index].shape
        if bucket.master.tensor is None:
            if known is None or known[0].numel() != found.numel or known[0].dtype != bucket.master.dtype:
                # Values are elsewhere: an object of the right shape, to which the state belongs.
                nothing = torch.full((1,), float("nan"), dtype=bucket.master.dtype)
                stand_in = self._nothing.setdefault(bucket.master.dtype, nothing).expand(found.numel)
                if not bucket.placement.shard_optimizer and shape:
                    stand_in = stand_in.view(shape) if found.numel else torch.empty(shape)
                known = (nn.Parameter(stand_in), found, bucket.master)
            self._pieces[id(parameter)] = (known[0], found, bucket.master)
            return known[0]
        view = bucket.master.tensor[found.offset : found.offset + found.numel]
        if shape and (bucket.whole or not bucket.placement.shard_optimizer):
            view = view.view(shape)  # all of it is here: show its shape
        if known is None or known[0].data_ptr() != view.data_ptr() or known[0].dtype != view.dtype:
            known = (nn.Parameter(view), found, bucket.master)
        self._pieces[id(parameter)] = (known[0], found, bucket.master)
        return known[0]

    def _divide_existing_state(self) -> None:
        existing = dict(self.optimizer.state)
        self.optimizer.state.clear()
        self._book.by_piece.update({key: existing.pop(key) for key in list(existing) if not isinstance(key, Tensor)})
        if self._lbfgs is not None and existing:
            existing = self._of_each(next(iter(existing.values())))
        for parameter, values in existing.items():
            assert isinstance(parameter, nn.Parameter)
            master = values.pop("master", None) if isinstance(self.optimizer, FusedOptimizer) else None
            if master is not None:
                self._take_master(parameter, master)
            self._keep_pieces(parameter, values)

    def _take_master(self, parameter: nn.Parameter, master: Tensor) -> None:
        """A fused optimizer that ran by itself kept master weights; from now on the bucket does."""
        place = self.model.place(parameter)
        assert place is not None
        bucket, index = place
        if bucket.has_master:
            bucket.set_master(index, master)

    def _keep_pieces(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Keep this rank's part of a parameter's whole state; low precision becomes the piece's fp32."""
        self._book.keep_whole(parameter, flattened(values) if self._lbfgs is not None else values)

    def offloaded_place(self, parameter: nn.Parameter, key: str) -> OffloadedPart | None:
        """Place of a per-element state of this rank's piece of `parameter` in a tier; None: it is in memory."""
        place, piece = self.model.place(parameter), self.piece(parameter)
        assert place is not None
        bucket, index = place
        if self._offloaded is None or piece is None:
            return None
        return self._offloaded.place(bucket, bucket.piece_of[index], key, piece.shape)

    # ---- the step ----

    def _rule(self) -> UpdateRule | None:
        """Stepper in place of the optimizer's own code."""
        optimizer, model = self.optimizer, self.model
        if model.optimizer_store is not None:
            return rule_for_parts(optimizer, self._elementwise, self._begins_with)
        masters = any(bucket.keeps_master and bucket.trainable for bucket in model.buckets)
        taken = model.config.fused_optimizers
        if isinstance(optimizer, MuonAdamW):
            if self._orthogonaliser is None:
                return None  # its own step does both
            optimizer = optimizer.adamw
        return rule_in_memory(optimizer, fused_optimizers=taken, devices=_devices(model), masters=masters)

    def begin_step(self, args: Any, kwargs: Any) -> Any:
        """Before torch's `step()`: gradients are reduced, and the shards updated or put into the groups for torch.

        Returns:
            The arguments that torch's step gets, where they are others: the closure has run.
        """
        if self._lbfgs is not None:
            return self._begin_evaluations(self._lbfgs, args, kwargs)
        changed = _run_closure_first(args, kwargs)
        self.restore()  # an earlier step may have raised before its end
        self.follow_assigned_state()
        self.model.reducer.settle()
        self._check_groups()
        self.skip_next = self._declines(self) or self.skip_next
        rule = self._rule()
        if self._offloaded is not None:
            self._offloaded.prepare(rule)
        trained = [self.piece(parameter) for parameter in self.parameters() if parameter.requires_grad]
        if any(piece is not None and piece.dtype != torch.float32 for piece in trained):
            rule = None
        self._fused = rule is not None
        matrices = self._matrices()
        self._swap_in(rule)
        if (rule is not None or self._orthogonaliser is not None) and not self.skip_next:
            scale = kwargs.get("grad_scale", 1.0)
            try:
                with torch.no_grad():
                    if self._offloaded is not None:
                        self._offloaded.step(self._updates, scale, matrices, self._orthogonaliser)
                    elif self._orthogonaliser is not None:
                        self._step_matrices(self._orthogonaliser, matrices, rule, scale)
                    elif rule is not None and rule.elementwise and self.model.recorders:
                        self._update_by_bucket(rule, scale)
                    elif rule is not None:
                        rule.update(_segments(self._updates), scale, self._combine)
            except Exception as error:
                self.stopped_by = f"{type(error).__name__}: {error}"
                raise
        return changed

    def end_step(self) -> None:
        """After torch's `step()`: the module's parameters are back in the groups, and whole where they have to be."""
        self._updates.clear()  # they hold the gradients
        self._swap_back()
        self.skipped, self.skip_next = self.skip_next, False
        if not self.skipped:
            self._show_new_values()
            self._record_after()

    def _update_by_bucket(self, rule: UpdateRule, scale: float) -> None:
        """One bucket after the other, so that recorders keep former values of no more than one."""
        updates: dict[int, list[Update]] = {}
        for update in self._updates:
            updates.setdefault(id(update.bucket), []).append(update)
        for own in updates.values():
            self._record_before([own[0].bucket])
            rule.update(_segments(own), scale)
            self._record_after()

    def _record_before(self, buckets: Sequence[ParameterBucket]) -> None:
        self._recorded = list(buckets)
        for recorder in self.model.recorders:
            recorder.before(self._recorded)

    def _record_after(self) -> None:
        recorded, self._recorded = self._recorded, []
        for recorder in self.model.recorders if recorded else ():
            recorder.after(recorded)

    def _show_new_values(self) -> None:
        """Carry the pieces' new values to the module's parameters. A collective where these are whole."""
        self.model.show_step(self._stepped, copied=self._fused)
        torch.autograd.graph.increment_version(self._stepped_parameters)  # a backward through old values is noticed
        for bucket in self._stepped:
            bucket.writes.note()
        self.model.forget_unsharded(self._stepped)

    # ---- LBFGS, whose step evaluates its closure several times ----

    def _begin_evaluations(self, lbfgs: DistributedLBFGS, args: Any, kwargs: Any) -> Any:
        closure = _closure_in(args, kwargs)
        if closure is None:
            raise ValueError(
                "LBFGS.step() evaluates the loss several times: call optimizer.step(closure) with a function that "
                "zeroes the gradients, computes the loss, runs its backward and returns it (float32 or bf16: fp16's "
                "loss scaling calls step() without one)"
            )
        self.restore()
        self.follow_assigned_state()
        first = self._evaluate(lbfgs, closure)
        self.skip_next = self._declines(self) or self.skip_next
        self._check_groups()
        places = {id(bucket): bucket for bucket, _ in map(self._place, self.parameters()) if bucket.trainable}
        self._stepped, self._stepped_parameters = list(places.values()), [p for p in self.parameters()]
        pieces = [piece for parameter in self.parameters() if (piece := self.piece(parameter)) is not None]
        self._hide_mapping()
        lbfgs.begin(pieces, self._book.by_piece)
        if not self.skip_next:
            self._record_before(self._stepped)
        if self.skip_next:
            lbfgs.take_gradients({})  # torch's step ends where all are zero
        else:
            self._hand_gradients(lbfgs)
        known = [first]

        def evaluate() -> Tensor:
            if known:
                return known.pop()
            self._show_new_values()
            loss = self._evaluate(lbfgs, closure)
            self._hand_gradients(lbfgs)
            return loss

        return _with_closure(args, kwargs, evaluate)

    def _evaluate(self, lbfgs: DistributedLBFGS, closure: Callable[[], Any]) -> Tensor:
        self._evaluating = True
        try:
            with torch.enable_grad():
                loss = closure()
            self.model.reducer.settle()
        finally:
            self._evaluating = False
        return lbfgs.mean_loss(loss)

    def _hand_gradients(self, lbfgs: DistributedLBFGS) -> None:
        owned = {id(bucket): self.model.gradient_of(bucket).owned_gradients() for bucket in self._stepped}
        found: dict[Tensor, Tensor] = {}
        for parameter in self.parameters():
            (bucket, index), piece = self._place(parameter), self.piece(parameter)
            gradient = owned.get(id(bucket), {}).get(index)
            if piece is not None and gradient is not None:
                assert isinstance(gradient, Tensor), "gradients in tiers are refused"
                found[piece] = gradient
        lbfgs.take_gradients(found)
        self.model.invalidate_unsharded(self._stepped, recorded=True)

    def _of_each(self, state: dict[str, Any]) -> dict[Tensor, Any]:
        """State of LBFGS in torch's form, by parameter."""
        parameters = list(self.parameters())
        return dict(zip(parameters, divided(state, [p.shape for p in parameters]), strict=True))

    def _matrices(self) -> list[Matrix]:
        """Those that this step orthogonalises, on whatever rank."""
        if self._orthogonaliser is None:
            return []
        groups = muon_groups(self.optimizer)
        return self._orthogonaliser.matrices(groups, [group["params"] for group in groups])

    def _step_matrices(
        self, orthogonaliser: Orthogonaliser, matrices: Sequence[Matrix], rule: UpdateRule | None, scale: float
    ) -> None:
        """Muon's steps, and those of a rule for other groups, whose state is in memory. A collective."""
        segments, muon = _segments(self._updates), {id(group) for group in muon_groups(self.optimizer)}
        others = [segment for segment in segments if id(segment.group) not in muon]
        if rule is not None:
            rule.update(others, scale, self._combine)
        of_matrix = {id(segment.owner): segment for segment in segments if id(segment.group) in muon}
        for segment in of_matrix.values():
            if MOMENTUM not in segment.state:
                segment.state[MOMENTUM] = torch.zeros_like(segment.like)

        def take(matrix: Matrix) -> Tensor:
            segment = of_matrix[id(matrix.parameter)]
            gradient, factor = segment.grad.to(segment.param.dtype).view(-1), segment.scale * scale
            gradient = gradient if factor == 1.0 else gradient * factor
            return direction(gradient, segment.state[MOMENTUM].view(-1), matrix.group)

        def give(matrix: Matrix, values: Tensor) -> None:
            segment = of_matrix[id(matrix.parameter)]
            change(segment.param.view(-1), values, matrix.group, matrix.shape)
            if segment.copy is not None:
                segment.copy.copy_(segment.param.view(-1))

        orthogonaliser.run(matrices, take, give)

    def _swap_in(self, rule: UpdateRule | None) -> None:
        muon = [] if self._orthogonaliser is None else muon_groups(self.optimizer)
        by_hand = {id(group) for group in (self.optimizer.param_groups if self._fused else muon)}
        stepped: dict[int, ParameterBucket] = {}
        self._stepped_parameters, self._updates = [], []
        gradients: dict[int, dict[int, tuple[Shard, float]]] = {}
        self._whole = [group["params"] for group in self.optimizer.param_groups]
        self._hide_mapping()
        self._in_steps.update(self._book.by_piece)
        states, entries = self._in_steps, self._book.entries
        for group in self.optimizer.param_groups:
            pieces = []
            for parameter in group["params"]:
                place = self.model.place(parameter)
                assert place is not None
                bucket, index = place
                gradient_bucket = self.model.gradient_of(bucket)
                piece = self.piece(parameter)
                if index in gradient_bucket.live:
                    self._stepped_parameters.append(parameter)
                    stepped[id(bucket)] = bucket
                    if not self.skip_next:
                        entry = entries.get(id(parameter)) or self._book.begin(parameter)
                        if piece is None:
                            entry.steps += 1
                if piece is None:
                    continue
                pieces.append(piece)
                if self.skip_next:
                    continue
                if id(bucket) not in gradients:
                    gradients[id(bucket)] = self._scaled_gradients(gradient_bucket)
                if index not in gradients[id(bucket)]:
                    continue
                gradient, factor = gradients[id(bucket)][index]
                if id(group) in by_hand:
                    state = states.setdefault(piece, {})
                    cut = bucket.piece_of[index]
                    self._updates.append(Update(group, parameter, piece, bucket, cut, gradient, factor, state))
                else:
                    assert isinstance(gradient, Tensor), "what is in tiers is updated by a rule"
                    piece.grad = gradient.to(piece.dtype).view(piece.shape)
            group["params"] = pieces
        self._stepped = list(stepped.values())
        if not self.skip_next:
            one_by_one = rule is not None and rule.elementwise and self._offloaded is None
            if self._orthogonaliser is not None or not one_by_one:
                self._record_before(self._stepped)
            self.model.invalidate_unsharded(self._stepped, recorded=True)

    def _scaled_gradients(self, gradients: GradientBucket) -> dict[int, tuple[Shard, float]]:
        if self._fused and (self._offloaded is not None or not lacks_kernels(gradients.bucket.device)):
            return gradients.scaled_gradients()
        return {index: (gradient, 1.0) for index, gradient in gradients.owned_gradients().items()}

    def _combine(self, segments: Sequence[Segment], sums: Tensor) -> Tensor:
        """Sums over the pieces of a parameter, wherever they lie. A collective where the optimizer is divided."""
        rows = {id(parameter): row for row, parameter in enumerate(self.parameters())}
        chosen = [rows[id(segment.owner)] for segment in segments]
        table = torch.zeros(len(rows), sums.shape[1], dtype=torch.float64)
        table[chosen] = sums
        if self.model.placement.shard_optimizer:
            table = torch.stack(self.model.mesh.shard_control.all_gather_small(table)).sum(dim=0)
        divided = [row for row, parameter in enumerate(self.parameters()) if self._part(parameter).dim is not None]
        if divided:  # the same on all tensor-parallel ranks
            table[divided] = torch.stack(self.model.mesh.tensor.all_gather_small(table[divided])).sum(dim=0)
        return table[chosen]

    def _place(self, parameter: nn.Parameter) -> tuple[ParameterBucket, int]:
        place = self.model.place(parameter)
        assert place is not None
        return place

    def _part(self, parameter: nn.Parameter) -> TensorPart:
        bucket, index = self._place(parameter)
        return bucket.parts[index]

    def _swap_back(self) -> None:
        if self._lbfgs is not None:
            self._book.by_piece = self._lbfgs.end()
            self._show_mapping()
            return
        assert self._whole is not None
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=False):
            for piece in group["params"]:
                piece.grad = None
            group["params"] = whole
        self._whole = None
        self._in_steps = self.optimizer.state
        self._book.by_piece = dict(self._in_steps)
        self._in_steps.clear()
        self._show_mapping()

    # ---- state ----

    @property
    def state(self) -> dict[Tensor, Any]:
        """This rank's state by piece, with what the user has done to `optimizer.state` since the last step."""
        self.follow_assigned_state()
        return self._book.by_piece

    def state_book(self) -> StateBook:
        """State by parameter; see `StateOwner`."""
        if self._detached:
            raise RuntimeError(f"this is the state of a {type(self.optimizer).__name__} that was detached")
        if not self._shown:
            raise RuntimeError(
                f"the state of {type(self.optimizer).__name__} cannot be asked for while its step runs: only the "
                "optimizer's own code sees it then, by this rank's pieces"
            )
        self.follow_assigned_state()
        return self._book

    def follow_assigned_state(self) -> None:
        """Take over what the user has assigned to `optimizer.state` since the last step, if anything.

        Raises:
            TypeError: If it is no mapping.
            ValueError: If it has values that cannot be divided.
        """
        if self._shown and (given := self.optimizer.state) is not self._mapping:
            self._show_mapping()
            self._mapping.replace(given)

    def _show_mapping(self) -> None:
        """Let the user have state by parameter."""
        state: Any = self._mapping  # a mapping, which is all that the type of torch's attribute stands for
        try:
            self.optimizer.state = state
        except AttributeError as error:
            raise TypeError(
                f"{type(self.optimizer).__name__}.state cannot be set: attach the optimizer whose state it shows"
            ) from error
        self._shown = True

    def _hide_mapping(self) -> None:
        """Let torch's code have state by piece, and the user none."""
        self._shown = False
        self.optimizer.state = self._in_steps

    @property
    def joint_state(self) -> bool:
        """True if all state is under the first parameter."""
        return self._lbfgs is not None

    @property
    def opaque_state(self) -> str:
        """Why single values of `optimizer.state` cannot be shown; "": they can."""
        if self._lbfgs is not None:
            return "since LBFGS keeps vectors over all parameters, divided among the ranks"
        if self._of_matrices and self.model.placement.shard_optimizer and self.model.mesh.shard_size > 1:
            return f"since the state of {type(self.optimizer).__name__} lies with the ranks that have whole matrices"
        return ""

    def _form(self, group: dict[str, Any]) -> dict[str, Any]:
        """The state that steps make for a few elements of a param group."""
        if self.opaque_state:
            return {"": Unknown("another rank holds it")}
        if any(group is each for each in muon_groups(self.optimizer)):
            return {MOMENTUM: torch.zeros(1)}
        chosen = self.optimizer.adamw if isinstance(self.optimizer, MuonAdamW) else self.optimizer
        return OwnSteps(chosen, self._begins_with).form(group)

    def clear_state(self) -> None:
        """Drop all state, for what all ranks load together."""
        self.follow_assigned_state()
        self._book.clear()
        self.edits.forget()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """This rank's optimizer state of `parameter`: flat pieces and scalars; empty before its first step.

        What is in a tier is read: a copy.
        """
        piece = self.piece(parameter)
        return {} if piece is None else {key: as_tensor(value) for key, value in self.state.get(piece, {}).items()}

    def write_state_of(self, parameter: nn.Parameter, key: str, values: Tensor) -> None:
        """Replace the values of one per-element state of this rank's piece.

        Raises:
            ValueError: If there is no such state.
        """
        piece = self.piece(parameter)
        assert piece is not None
        state = self.state.get(piece, {})
        if key not in state:
            raise ValueError(f"no optimizer state {key!r} for this parameter; it has {sorted(state)}")
        if isinstance(state[key], OffloadedPart):
            state[key].write(values)
        else:
            state[key].copy_(values.view_as(state[key]))

    def set_state_of(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Replace this rank's optimizer state of `parameter`; where it has no piece, what stands for that of others."""
        self._book.put(parameter, values)

    def reduction_begins(self) -> None:
        """A backward begins that will reduce gradients."""
        if self._offloaded is not None:
            self._offloaded.reduction_begins()

    def offloaded(self) -> Iterator[tuple[ParameterBucket, OffloadedVector]]:
        """The vectors of its state in a tier, and whose they are."""
        if self._offloaded is not None:
            yield from self._offloaded.vectors()

    def tensors_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's optimizer state of `parameter` that is in memory."""
        piece = self.piece(parameter)
        values = () if piece is None else self.state.get(piece, {}).values()
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def staging_bytes(self) -> int:
        """Host memory that steps on state in files have taken."""
        return 0 if self._offloaded is None else self._offloaded.staging_bytes

    @cached_property
    def keeps_any_state(self) -> bool:
        """True if its state need not have the parameters' shapes: it steps on more than elements."""
        return reason_against(self.optimizer) is not None

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank in whatever tier, master weights left out."""
        tensors = [value for values in self._book.pieces() for value in values.values() if isinstance(value, Tensor)]
        offloaded = 0 if self._offloaded is None else self._offloaded.nbytes()
        return offloaded + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def load_whole(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state in the optimizer's own `state_dict()` form, keep this rank's pieces of it.

        Raises:
            ValueError: If its param groups do not fit (torch's own message).
        """
        self.optimizer.load_state_dict({**state_dict, "state": {}})  # torch would cast and move whole moments
        self._show_mapping()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        self.clear_state()
        states = {number: state_dict["state"][number] for number in numbers if number in state_dict["state"]}
        if self._lbfgs is not None and states:
            states = dict(zip(numbers, self._of_each(states[numbers[0]]).values(), strict=True))
        for number, parameter in zip(numbers, self.parameters(), strict=True):
            if number in states:
                self._keep_pieces(parameter, states[number])

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let its state in memory lie where `move` puts it."""
        self.follow_assigned_state()
        for values in self._book.pieces():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = move(value)

    def viewed(self) -> Iterator[int]:
        """For each piece, what it is a view of, by id."""
        return (id(storage) for _, _, storage in self._pieces.values())

    def refresh_pieces(self) -> None:
        """Have pieces of the present master weights, before these move."""
        for parameter in self.parameters():
            self.piece(parameter)

    def follow_masters(self) -> None:
        """Master weights lie elsewhere: pieces stay the same objects, to which the state belongs."""
        for parameter in self.parameters():
            place, known = self.model.place(parameter), self._pieces.get(id(parameter))
            if place is None or known is None:
                continue
            bucket, (piece, cut, _) = place[0], known
            if bucket.master.tensor is not None:
                piece.data = bucket.master.tensor[cut.offset : cut.offset + cut.numel].view(piece.shape)
            self._pieces[id(parameter)] = (piece, cut, bucket.master)

    def detach(self) -> None:
        """Let go of the optimizer; its state on this rank is dropped."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hide_mapping()
        self._detached = True
        self._book.clear()
        if self._offloaded is not None:
            self._offloaded.close()

    @property
    def partially_applied(self) -> bool:
        """True if a step began and did not end; False while it evaluates its closure."""
        running = self._lbfgs is not None and self._lbfgs.running
        return (running and not self._evaluating) or self._whole is not None

    def restore(self) -> None:
        """Put the module's parameters back into the groups after a step that raised."""
        self.stopped_by = ""
        if self._whole is not None or (self._lbfgs is not None and self._lbfgs.running):
            self._swap_back()
        elif not self._shown and not self._detached:
            self._show_mapping()

    @contextmanager
    def whole_state(self, states: dict[int, dict[str, Any]]) -> Iterator[None]:
        """Let the optimizer hold the given full states (by parameter id) inside the block."""
        if self._lbfgs is not None and states:
            first, *_ = parameters = list(self.parameters())
            states = {id(first): joined([states[id(parameter)] for parameter in parameters])}
        self.follow_assigned_state()
        self._hide_mapping()
        for parameter in self.parameters():
            if id(parameter) in states:
                self.optimizer.state[parameter] = states[id(parameter)]
        try:
            yield
        finally:
            self._in_steps.clear()
            self._show_mapping()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        if self._shown and self.state_book().any():
            raise RuntimeError(
                f"{type(optimizer).__name__}.state_dict() would hand out an empty state: this rank holds only its "
                "part. Call engine.optimizer_state_dict(optimizer) on all ranks, or engine.save(...)."
            )

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if state_dict.get("state"):
            raise RuntimeError(
                f"{type(optimizer).__name__}.load_state_dict() cannot divide a whole state among ranks: call "
                "engine.load_optimizer_state_dict(optimizer, state_dict) instead."
            )


def _devices(model: ShardedModel) -> set[str]:
    return {bucket.device.type for bucket in model.buckets}


def _segments(updates: Sequence[Update]) -> list[Segment]:
    """All of the pieces, whose state is in memory, as the rule takes them."""
    copies: dict[int, dict[int, Tensor]] = {}  # by the id of a bucket, then by index
    found = []
    for update in updates:
        bucket, piece, gradient = update.bucket, update.piece, update.gradient
        if id(bucket) not in copies:
            copies[id(bucket)] = split_pieces(bucket.weights.values, bucket.cuts) if bucket.has_master else {}
        copy, owner = copies[id(bucket)].get(update.cut.index), update.parameter
        assert isinstance(gradient, Tensor)
        found.append(Segment(update.group, piece.detach(), gradient, update.state, piece, copy, update.factor, owner))
    return found


def _run_closure_first(args: Any, kwargs: Any) -> Any:
    """Evaluate a closure before gradients are exchanged for pieces; elementwise optimizers do so first anyway."""
    closure = _closure_in(args, kwargs)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return _with_closure(args, kwargs, lambda: loss)


def _closure_in(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    found: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found


def _with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
    """Arguments of a step with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
