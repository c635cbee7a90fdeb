"""Any elementwise torch optimizer, and those of whole matrices, run on the pieces that this rank owns.

The user's optimizer object stays what it is: same instance, same `param_groups` with the module's own parameters, same
hyper-parameter dicts (so schedulers work). Only while `step()` runs does each group list this rank's pieces instead:
flat fp32 views into the master buffers, with flat views of the reduced gradients. An optimizer of whole matrices
(`matrix_optimizers`) gets these in their shape: the layout lets each lie in one rank's slice (`fsdp.layout`). The
public step hooks of `torch.optim.Optimizer` do the exchange, so it does not matter who calls `step()`.

    ShardedOptimizer    state, by parameter to the user and by piece to steps; saves and loads
    Pieces              this rank's part of each parameter (`optim.pieces`)
    StepMethod          who carries steps out: a rule, torch's code, a tier, Muon, LBFGS (`METHODS`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.state_bits import is_coded
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector
from zero_strategy.ops.dynamic_codes import encode
from zero_strategy.optim.coded_state import SIGNED, codes_key, scale_key
from zero_strategy.optim.elementwise_step import ElementwiseStep, MatrixStep
from zero_strategy.optim.fused import FusedOptimizer
from zero_strategy.optim.grad_norm import OwnGradients
from zero_strategy.optim.lbfgs import LbfgsStep
from zero_strategy.optim.muon_step import MuonStep
from zero_strategy.optim.offloaded import OffloadedStep, as_tensor
from zero_strategy.optim.optimizer_checks import reason_against
from zero_strategy.optim.pieces import Pieces
from zero_strategy.optim.state_bits_check import check_state_bits, wants_codes
from zero_strategy.optim.state_book import StateBook, Unknown
from zero_strategy.optim.state_mapping import EditLog, StateMapping
from zero_strategy.optim.step_method import StepMethod
from zero_strategy.runtime.torch_private import without_grad

# The order matters: `LbfgsStep` refuses tiers by name, `OffloadedStep` has steps of Muon of its own, and `MatrixStep`
# would take all of Muon, so that `MuonStep` is asked before.
METHODS: tuple[type[StepMethod], ...] = (LbfgsStep, OffloadedStep, MuonStep, MatrixStep, ElementwiseStep)
"""Ways to take steps, in the order in which they are asked for an optimizer; the last takes every one."""


class ShardedOptimizer:
    """The tie between one torch optimizer and a sharded model.

    Args:
        optimizer: The optimizer over parameters of `model`; state that it has already is divided.
        model: The sharded model.
        declines: Asked when a step's gradients are reduced, on all ranks: whether it is not to be taken.

    Attributes:
        optimizer: The user's object.
        pieces: This rank's parts of its parameters.
        gradients: Of its parameters.
        book: Its state.
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
        if isinstance(optimizer, FusedOptimizer) and not model.config.precision.master_weights:
            raise ValueError(
                f"{type(optimizer).__name__} keeps float32 master weights, which precision.master_weights=False rules "
                "out: remove that setting, or use the torch.optim class"
            )
        self.optimizer, self.model, self._declines = optimizer, model, declines
        self.skip_next = self.skipped = False
        self.stopped_by = ""
        self._recorded: list[ParameterBucket] = []
        self.pieces = Pieces(optimizer, model)
        # First of all: a parameter that is not the model's has no bucket, on which all that follows relies.
        self.pieces.check()
        check_state_bits(optimizer, model)
        self.edits = EditLog()
        self.book = StateBook(self, self._sample_state)
        self._mapping = StateMapping(self)
        # Torch's own mapping is kept for the steps: it makes an entry for a piece that has none.
        self._in_steps = optimizer.state
        self._shown = self._detached = False
        self.gradients = OwnGradients(model, self.parameters)
        # Before state is divided: the method tries steps out with a state like the one that is there. Room in a tier
        # is made now, too, since what is divided goes there.
        self._method = next(method for method in METHODS if method.takes(optimizer, model))(self)
        self._method.check_groups()
        self._divide_existing_state()
        self.show_state()
        # Last, so that an optimizer that is refused above is left without a hook.
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]

    # ---- parameters and pieces ----

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module parameters of all groups, in group order."""
        return self.pieces.parameters()

    def piece(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This rank's part of `parameter` as the optimizer sees it, flat and fp32 where a master copy is kept."""
        return self.pieces.of(parameter)

    def coded(self, parameter: nn.Parameter) -> bool:
        """True if the states of a parameter have 8 bits."""
        if not wants_codes(self.optimizer, self.model):
            return False
        groups = self.optimizer.param_groups
        lists = [group["params"] for group in groups] if self.pieces.full is None else self.pieces.full
        group = next(g for g, each in zip(groups, lists, strict=True) if any(parameter is p for p in each))
        return is_coded(group.get("state_bits"), self.pieces.state_bits(parameter), parameter.numel())

    def offloaded_place(self, parameter: nn.Parameter, key: str) -> OffloadedPart | None:
        """Place of a per-element state of this rank's piece of `parameter` in a tier; None: it is in memory."""
        (bucket, index), piece = self.pieces.bucket_and_index(parameter), self.piece(parameter)
        if piece is None:
            return None
        return self._method.offloaded_place(bucket, bucket.piece_of[index], key, piece.shape)

    def _divide_existing_state(self) -> None:
        existing = dict(self.optimizer.state)
        # It is `_in_steps`, which is empty between steps.
        self.optimizer.state.clear()
        self.book.by_piece.update({key: existing.pop(key) for key in list(existing) if not isinstance(key, Tensor)})
        for parameter, values in self._method.split_state(existing).items():
            master = values.pop("master", None) if isinstance(self.optimizer, FusedOptimizer) else None
            if master is not None:  # a fused optimizer that ran by itself kept master weights; now the bucket does
                bucket, index = self.pieces.bucket_and_index(parameter)
                if bucket.has_master:
                    bucket.set_master(index, master)
            self._keep_pieces(parameter, values)

    def _keep_pieces(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Keep this rank's part of a parameter's whole state; low precision becomes the piece's fp32."""
        self.book.keep_whole(parameter, self._method.flat_state(values))

    # ---- the step ----

    def begin_step(self, args: Any, kwargs: Any) -> Any:
        """Before torch's `step()`: gradients are reduced, and the shards updated or put into the groups for torch.

        Returns:
            The arguments that torch's step gets, where they are others: the closure has run.
        """
        self.restore()  # an earlier step may have raised before its end
        return self._method.begin(args, kwargs)

    @without_grad
    def end_step(self) -> None:
        """After torch's `step()`: the module's parameters are back in the groups, and whole where they have to be."""
        self._method.end()
        # For one step only: the next one has other gradients.
        self.skipped, self.skip_next = self.skip_next, False
        if not self.skipped:
            self.show_new_values()
            # After new values are shown: torch's own code has changed master weights alone until then.
            self.record_after()

    def settle(self) -> None:
        """Before anything changes: reduce gradients, look at the groups, and agree on whether the step is taken."""
        self.model.reducer.settle()
        self.pieces.check()
        check_state_bits(self.optimizer, self.model)
        self._method.check_groups()
        # Last, since it looks at reduced gradients, those that `no_sync` kept back among them.
        self.skip_next = self._declines(self) or self.skip_next

    def show_new_values(self) -> None:
        """Carry the pieces' new values to the module's parameters. A collective where these are whole."""
        changed = self._method.changed
        self.model.show_step(changed, copied=self._method.copied)
        # A backward through old values is noticed.
        torch.autograd.graph.increment_version(self._method.changed_parameters)
        # Once versions have moved: writes of the user are told by these, and the step's own are none.
        for bucket in changed:
            bucket.writes.note()
        # Stage 3: what is held whole is gathered anew, from slices that have the new values by now.
        self.model.forget_unsharded(changed)

    def record_before(self, buckets: Sequence[ParameterBucket]) -> None:
        """Let the model's recorders look at values that are about to change."""
        self._recorded = list(buckets)
        for recorder in self.model.recorders:
            recorder.before(self._recorded)

    def record_after(self) -> None:
        """Let them look at what has changed since."""
        recorded, self._recorded = self._recorded, []
        # Nothing is left to tell after a skipped step, or one that has recorded bucket by bucket.
        for recorder in self.model.recorders if recorded else ():
            recorder.after(recorded)

    @property
    def partially_applied(self) -> bool:
        """True if a step began and did not end; False while it evaluates its closure."""
        return self._method.running and not self._method.evaluating

    def restore(self) -> None:
        """Put the module's parameters back into the groups after a step that raised."""
        self.stopped_by = ""
        if self._method.running:
            self._method.end()
        # LBFGS hides state before it is `running`; an error in between leaves it hidden.
        elif not self._shown and not self._detached:
            self.show_state()

    # ---- state ----

    @property
    def state(self) -> dict[Tensor, Any]:
        """This rank's state by piece, with what the user has done to `optimizer.state` since the last step."""
        self.follow_assigned_state()
        return self.book.by_piece

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
        return self.book

    def follow_assigned_state(self) -> None:
        """Take over what the user has assigned to `optimizer.state` since the last step, if anything.

        Raises:
            TypeError: If it is no mapping.
            ValueError: If it has values that cannot be divided.
        """
        if self._shown and (given := self.optimizer.state) is not self._mapping:
            # First: `replace` asks for the book, which would look for an assignment again, without end.
            self.show_state()
            self._mapping.replace(given)

    def show_state(self) -> None:
        """Let the user have state by parameter."""
        state: Any = self._mapping  # a mapping, which is all that the type of torch's attribute stands for
        try:
            self.optimizer.state = state
        except AttributeError as error:
            raise TypeError(
                f"{type(self.optimizer).__name__}.state cannot be set: attach the optimizer whose state it shows"
            ) from error
        self._shown = True

    def hide_state(self) -> dict[Tensor, dict[str, Any]]:
        """Let torch's code have state by piece, and the user none; gives that mapping, empty but for a step's own."""
        self._shown = False
        self.optimizer.state = self._in_steps
        return self._in_steps

    def take_state_back(self) -> None:
        """Keep what torch's code has left as state by piece, and let the user have it by parameter."""
        self._in_steps = self.optimizer.state  # it may have made another
        self.book.by_piece = dict(self._in_steps)
        # Emptied, not dropped: the next step and `whole_state` borrow it again.
        self._in_steps.clear()
        self.show_state()

    @property
    def joint_state(self) -> bool:
        """True if all state is under the first parameter."""
        return self._method.joint_state

    @property
    def opaque_state(self) -> str:
        """Why single values of `optimizer.state` cannot be shown; "": they can."""
        return self._method.opaque_state

    def _sample_state(self, group: dict[str, Any]) -> dict[str, Any]:
        """The state that steps make for a few elements of a param group."""
        # Not empty, as a parameter that others have stepped on counts as one that has state.
        return {"": Unknown("another rank holds it")} if self.opaque_state else self._method.sample_state(group)

    def clear_state(self) -> None:
        """Drop all state, for what all ranks load together."""
        # An assignment that was noticed only afterwards would bring state back.
        self.follow_assigned_state()
        self.book.clear()
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
        if key not in state and codes_key(key) in state:
            codes, scale = encode(values.detach().float().contiguous(), signed=SIGNED[key])
            self.write_state_of(parameter, codes_key(key), codes)
            self.write_state_of(parameter, scale_key(key), scale)
            return
        if key not in state:
            raise ValueError(f"no optimizer state {key!r} for this parameter; it has {sorted(state)}")
        if isinstance(state[key], OffloadedPart):
            state[key].write(values)
        else:
            state[key].copy_(values.view_as(state[key]))

    def set_state_of(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Replace this rank's optimizer state of `parameter`; where it has no piece, what stands for that of others."""
        self.book.put(parameter, values)

    def reduction_begins(self) -> None:
        """A backward begins that will reduce gradients."""
        self._method.reduction_begins()

    def offloaded(self) -> Iterator[tuple[ParameterBucket, OffloadedVector]]:
        """The vectors of its state in a tier, and whose they are."""
        yield from self._method.offloaded_vectors()

    def tensors_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's optimizer state of `parameter` that is in memory."""
        piece = self.piece(parameter)
        values = () if piece is None else self.state.get(piece, {}).values()
        return [value for value in values if isinstance(value, Tensor)]

    @property
    def staging_bytes(self) -> int:
        """Host memory that steps on state in files have taken."""
        return self._method.staging_bytes

    @cached_property
    def keeps_any_state(self) -> bool:
        """True if its state need not have the parameters' shapes: it steps on more than elements."""
        return reason_against(self.optimizer) is not None

    def unscale(self, scale: float) -> bool:
        """Divide its gradients by a loss scale; the next step is skipped if one is not finite. A collective.

        Returns:
            Whether all are.
        """
        finite = self.gradients.norm(float("inf")).finite
        self.gradients.scale(1.0 / scale)
        self.skip_next = not finite
        return finite

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank in whatever tier, master weights left out."""
        tensors = [value for values in self.book.pieces() for value in values.values() if isinstance(value, Tensor)]
        vectors = [vector for _, vector in self.offloaded()]  # heads on the device with them
        return sum(vector.numel * vector.dtype.itemsize for vector in vectors) + sum(map(_nbytes, tensors))

    def load_whole(self, state_dict: dict[str, Any]) -> None:
        """Take a whole state in the optimizer's own `state_dict()` form, keep this rank's pieces of it.

        Raises:
            ValueError: If its param groups do not fit (torch's own message).
        """
        self.optimizer.load_state_dict({**state_dict, "state": {}})  # torch would cast and move whole moments
        # Torch has put an empty dict there, which is no assignment of the user's.
        self.show_state()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        self.clear_state()
        parameters = dict(zip(numbers, self.parameters(), strict=True))
        states = {parameters[number]: state for number, state in state_dict["state"].items() if number in parameters}
        for parameter, values in self._method.split_state(states).items():
            self._keep_pieces(parameter, values)

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let its state in memory lie where `move` puts it."""
        self.follow_assigned_state()
        for values in self.book.pieces():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = move(value)

    def viewed(self) -> Iterator[int]:
        """For each tensor that is kept between steps, what it is a view of, by id."""
        return self.pieces.viewed()

    def refresh_pieces(self) -> None:
        """Have pieces of the present master weights, before these move."""
        for parameter in self.parameters():
            self.piece(parameter)

    def follow_masters(self) -> None:
        """Master weights lie elsewhere: pieces stay the same objects, to which the state belongs."""
        self.pieces.follow_masters()

    def detach(self) -> None:
        """Let go of the optimizer; its state on this rank is dropped."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # Torch's own mapping is the optimizer's state again, and empty.
        self.hide_state()
        self._detached = True
        self.book.clear()
        self._method.close()  # Last: values in the book may lie in the tier's room

    @contextmanager
    def whole_state(self, states: dict[int, dict[str, Any]]) -> Iterator[None]:
        """Let the optimizer hold the given full states (by parameter id) inside the block."""
        states = self._method.join_state(states)
        self.follow_assigned_state()
        self.hide_state()
        for parameter in self.parameters():
            if id(parameter) in states:
                self.optimizer.state[parameter] = states[id(parameter)]
        try:
            yield
        finally:
            self._in_steps.clear()
            self.show_state()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        # In `whole_state` it is hidden: there the engine itself asks, for a state that is whole.
        if self._shown and self.state_book().any():
            raise RuntimeError(
                f"{type(optimizer).__name__}.state_dict() would hand out an empty state: this rank holds only its "
                "part. Call engine.optimizer_state_dict(optimizer) on all ranks, or engine.save(...)."
            )

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # Groups alone may pass: `load_whole` hands torch these, and divides the state itself.
        if state_dict.get("state"):
            raise RuntimeError(
                f"{type(optimizer).__name__}.load_state_dict() cannot divide a whole state among ranks: call "
                "engine.load_optimizer_state_dict(optimizer, state_dict) instead."
            )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
