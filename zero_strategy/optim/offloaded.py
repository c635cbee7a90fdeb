"""Steps on per-element optimizer state in a tier.

States are made when the optimizer is attached, and are read and written by parameter. A step goes through them chunk by
chunk (`optim.streamed`), by an update rule, or by the optimizer's own code on parts of parameters (`optim.own_steps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.comm.store import together
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector, VectorSpec
from zero_strategy.optim.coded_state import SCALES, codes_key, in_form
from zero_strategy.optim.elementwise_step import why_opaque
from zero_strategy.optim.fused import UpdateRule, rule_for
from zero_strategy.optim.muon import MOMENTUM, muon_groups
from zero_strategy.optim.muon_step import Directions, MuonParts
from zero_strategy.optim.optimizer_checks import (
    check_elementwise,
    check_matrices,
    is_elementwise,
    is_matrix_optimizer,
    reason_against,
)
from zero_strategy.optim.orthogonaliser import Matrix, Orthogonaliser, orthogonalisers
from zero_strategy.optim.own_steps import OwnSteps
from zero_strategy.optim.pieces import Row
from zero_strategy.optim.power_sums import Shard
from zero_strategy.optim.step_method import PieceStep, SteppedOptimizer
from zero_strategy.optim.streamed import StreamedStep, Update


def rule_for_parts(
    optimizer: Optimizer, asserted: Sequence[str], begins_with: dict[str, Any] | None = None
) -> UpdateRule | None:
    """Stepper of parts of parameters: a rule of ours, or its own code; None: nothing can.

    Args:
        optimizer: The optimizer.
        asserted: Class names that the user declares to be elementwise.
        begins_with: See `OwnSteps`.
    """
    if muon_groups(optimizer):
        return MuonParts()
    rule = rule_for(optimizer, any_implementation=True)  # torch's fused and foreach are the same algorithm
    return OwnSteps(optimizer, begins_with) if rule is None and is_elementwise(optimizer, asserted) else rule


def _without(vectors: dict[str, OffloadedVector], keys: Sequence[str]) -> dict[str, OffloadedVector]:
    return {key: vector for key, vector in vectors.items() if key not in keys}


class OffloadedStep(PieceStep):
    """The step of an optimizer whose state is vectors in a tier, by bucket and key; Muon's in two passes.

    Args:
        sharded: The optimizer.

    Raises:
        TypeError: If it is not elementwise.
        ValueError: If its steps cannot be taken chunk by chunk; names the way out.
        OSError: If the tier has no room.
        RuntimeError: If it has none on another rank.
    """

    copied = True

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        optimizer, model, store = self.optimizer, self.model, self.model.optimizer_store
        assert store is not None
        # All groups by hand: torch's own code would find state, and maybe pieces, without values.
        self.by_hand, self._store, self._needs_whole = None, store, False
        self._asserted = list(model.config.elementwise_optimizers)
        self._muon = orthogonalisers(model) if muon_groups(optimizer) else None
        self._matrices: list[list[Matrix]] = []
        if self._muon is None:
            self._check_kind()
        self.check_groups()
        self.opaque_state = why_opaque(optimizer, model) if self._muon is None else ""
        rule = self._find_rule()
        self._vectors: dict[int, dict[str, OffloadedVector]] = {}
        # Keeps names of vectors apart: another optimizer may have parameters in the same buckets.
        self._number = store.new_number()
        self._rule = self._check(rule)
        self._step = StreamedStep(store)
        self._momenta = StreamedStep(store) if self._muon is not None else None
        ops.ensure("cpu")  # wherever the model is
        self.reserve()

    @classmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True if the config puts optimizer state into a tier."""
        return model.optimizer_store is not None

    def _check_kind(self) -> None:
        model, declared = self.model, self.model.config.elementwise_optimizers
        self._needs_whole = is_matrix_optimizer(self.optimizer, model.config.matrix_optimizers)
        divided = model.placement.shard_optimizer
        if not self._needs_whole:
            whole = not (divided or model.mesh.tensor.size > 1 or model.experts.layers)
            check_elementwise(self.optimizer, declared, whole=whole)
        # In pieces it is known, declared, or was tried just now.
        if (divided and not self._needs_whole) or is_elementwise(self.optimizer, declared):
            self._asserted.append(type(self.optimizer).__name__)

    def check_groups(self) -> None:
        """See `StepMethod`."""
        if self._muon is not None or self._needs_whole:
            check_matrices(self.optimizer, self.model, whole=self._needs_whole)

    def _find_rule(self) -> UpdateRule | None:
        return rule_for_parts(self.optimizer, self._asserted, self.begins_with)

    def _check(self, rule: UpdateRule | None) -> UpdateRule:
        name = type(self.optimizer).__name__
        if rule is None or any(rule.vectors(group) is None for group in self.optimizer.param_groups):
            raise ValueError(
                f"offload.optimizer takes steps on the host, a part of a parameter at a time, which {name} cannot: "
                f"{self._why_not(rule)}. Elementwise optimizers of torch.optim can, and your own that are named in "
                "elementwise_optimizers; with others use offload.optimizer: none"
            )
        for bucket, _, _ in self._trained():
            if bucket.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"offload.optimizer takes no {bucket.dtype} parameters ({bucket.names[0]!r})")
            if bucket.dtype != torch.float32 and not self.model.config.precision.master_weights:
                raise ValueError(
                    "offload.optimizer needs precision.master_weights=True for parameters of low precision"
                )
        return rule

    def _why_not(self, rule: UpdateRule | None) -> str:
        refused = (None if rule is None else rule.refuses(group) for group in self.optimizer.param_groups)
        options = next((each for each in refused if each is not None), None)
        return options or reason_against(self.optimizer) or "its update may need more than the element it changes"

    def _trained(self) -> Iterable[tuple[ParameterBucket, dict[str, Any], bool]]:
        """Bucket and group of every parameter that may have a gradient, and if its states have 8 bits; on all ranks."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                place = self.model.place(parameter)
                if place is not None and parameter.requires_grad:
                    yield place[0], group, self.sharded.coded(parameter)

    def prepare(self) -> None:
        """Take in parameters that were frozen, new groups and changed options. A collective.

        Raises:
            ValueError, OSError, RuntimeError: As for making one.
        """
        # In each step: options of groups may have changed, parameters been unfrozen and groups added.
        self._rule = self._check(self._find_rule())
        self.reserve()
        if self._muon is not None:
            groups = muon_groups(self.optimizer)
            # Now, while the groups list the module's parameters.
            of_groups = [group["params"] for group in groups]
            self._matrices = [each.matrices(groups, of_groups) for each in self._muon]

    def gradients_of(self, row: Row) -> dict[int, tuple[Shard, float]]:
        """See `PieceStep`: the rule multiplies by the factor in its pass."""
        return row.gradients.scaled_gradients()

    def reserve(self) -> None:
        """Make the vectors that param groups need and have not yet, all together or none. A collective if there are.

        Raises:
            ValueError: If param groups want different states in one bucket.
            OSError: If the tier has no room.
        """
        wanted: dict[str, VectorSpec] = {}
        places: dict[str, tuple[int, str]] = {}
        for bucket, group, coded in self._trained():
            kept = self._rule.coded_vectors(group) if coded else self._rule.vectors(group)
            known, numel = self._vectors.get(id(bucket), {}), bucket.owned.stop - bucket.owned.start
            for key, (dtype, fill) in (kept or {}).items():
                name = f"{self._number}/{bucket.names[0]}/{key}"
                spec = VectorSpec(numel, dtype, fill, bucket.device)
                made = known.get(key)
                before: VectorSpec | OffloadedVector = wanted.get(name, spec) if made is None else made
                if (before.dtype, before.fill) != (dtype, fill):
                    raise ValueError(
                        f"param groups of {type(self.optimizer).__name__} keep {key} in "
                        f"{(before.dtype, before.fill)} and {(dtype, fill)} "
                        f"for parameters of the bucket of {bucket.names[0]!r}; with offload.optimizer they "
                        "must be alike"
                    )
                if made is None:
                    wanted[name], places[name] = spec, (id(bucket), key)
        # `_trained` is alike on all ranks, so all of them want vectors or none; only the room may be missing on one.
        made_now = together(self.model.mesh.control, lambda: self._store.add(wanted)) if wanted else {}
        for name, vector in made_now.items():
            identity, key = places[name]
            self._vectors.setdefault(identity, {})[key] = vector

    def offloaded_place(self, bucket: ParameterBucket, cut: Piece, key: str, shape: torch.Size) -> OffloadedPart | None:
        """See `StepMethod`."""
        vector = self._vectors.get(id(bucket), {}).get(key)
        return None if vector is None else vector.part(cut.offset if cut.numel else 0, shape)

    def take(self, scale: float) -> None:
        """See `PieceStep` and `StreamedStep.run`."""
        updates: Sequence[Update] = self.updates
        for update in updates:
            if isinstance(self._rule, OwnSteps):
                self._rule.check_state(update.group, update.state)
            self._settle_form(update)
            for key, value in update.state.items():
                if key in SCALES:  # one for 256 elements: they stay in host memory
                    continue
                if is_per_element(value, update.piece.shape) and isinstance(value, Tensor):  # it was frozen until now
                    place = self.offloaded_place(update.bucket, update.cut, key, update.piece.shape)
                    assert place is not None
                    place.write(value)
                    update.state[key] = place
        vectors = self._vectors
        if self._muon is not None and self._momenta is not None:
            updates = self._orthogonal(updates, scale, self._muon, self._momenta)
            # The first pass has updated the momenta: the second one neither reads nor writes them.
            vectors = {key: _without(each, [MOMENTUM]) for key, each in vectors.items()}
        self._step.run(self._rule, updates, vectors, scale)

    def _settle_form(self, update: Update) -> None:
        """Bring states that were set or loaded with other bits into the form that they are to have."""
        keys, state = self._rule.coded_states, update.state
        if not state.keys().isdisjoint(keys if update.coded else map(codes_key, keys)):
            formed = in_form({key: as_tensor(value) for key, value in state.items()}, keys, coded=update.coded)
            state.clear()
            state.update(formed)

    def _orthogonal(
        self, updates: Sequence[Update], scale: float, by_ranks: Sequence[Orthogonaliser], momenta: StreamedStep
    ) -> list[Update]:
        """The updates with orthogonal ones in the place of gradients, after a pass over momenta. A collective."""
        muon = {id(group) for group in muon_groups(self.optimizer)}
        of_matrices = [update for update in updates if id(update.group) in muon]
        vectors = {key: {k: v for k, v in each.items() if k == MOMENTUM} for key, each in self._vectors.items()}
        directions, found = Directions(), dict[int, list[tuple[int, Tensor]]]()
        momenta.run(directions, of_matrices, vectors, scale, weights=False)
        device = self.model.device

        def take(rank: int, matrix: Matrix) -> Tensor:
            return directions.take(matrix, rank, device)

        def give(matrix: Matrix, values: Tensor) -> None:
            found.setdefault(id(matrix.parameter), []).append((matrix.number, values))

        for each, matrices in zip(by_ranks, self._matrices, strict=True):
            each.run(matrices, partial(take, each.rank), give)
        # Of a stack they came in the order of costs.
        joined = {key: _in_order(parts) for key, parts in found.items()}
        return [
            # The factor went into the momenta, which are all the state that Muon has.
            replace(update, gradient=joined.get(id(update.parameter), torch.empty(0)), factor=1.0, state={})
            if id(update.group) in muon
            else update
            for update in updates
        ]

    def reduction_begins(self) -> None:
        """A backward begins: read what the next step begins with beside it."""
        # Muon's step begins with the pass over momenta.
        (self._momenta or self._step).read_ahead()

    def offloaded_vectors(self) -> Iterator[tuple[ParameterBucket, OffloadedVector]]:
        """See `StepMethod`."""
        for bucket in self.model.buckets:
            for vector in self._vectors.get(id(bucket), {}).values():
                yield bucket, vector

    @property
    def staging_bytes(self) -> int:
        """Host memory that steps use."""
        return self._step.staging_bytes + (0 if self._momenta is None else self._momenta.staging_bytes)

    def close(self) -> None:
        """Give the room back; the states are lost."""
        # Before the room goes: reads and writes of a pass may be under way in it.
        self._step.close()
        if self._momenta is not None:
            self._momenta.close()
        self._store.remove([vector for vectors in self._vectors.values() for vector in vectors.values()])
        self._vectors.clear()


def _in_order(parts: list[tuple[int, Tensor]]) -> Tensor:
    """Values by the numbers of their matrices, joined."""
    ordered = [values for _, values in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered)


def as_tensor(value: Any) -> Any:
    """A state's values, read if they are in a tier."""
    return value.read() if isinstance(value, OffloadedPart) else value


def is_per_element(value: Any, shape: torch.Size) -> bool:
    """True if a state of a piece of `shape` has a value per element."""
    return isinstance(value, (Tensor, OffloadedPart)) and value.shape == shape and len(value.shape) > 0
