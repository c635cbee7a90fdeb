"""An optimizer's per-element state in a tier: made when the optimizer is attached, read and written by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.distributed.together import together
from zero_strategy.memory.chunked import ChunkStore
from zero_strategy.memory.vectors import OffloadedPart, OffloadedVector, VectorSpec
from zero_strategy.optim.elementwise import reason_against
from zero_strategy.optim.own_steps import OwnSteps
from zero_strategy.optim.streamed import StreamedStep, Update
from zero_strategy.optim.update_rules import UpdateRule
from zero_strategy.sharding.layout import Piece
from zero_strategy.sharding.model import ShardedModel
from zero_strategy.sharding.parameters import ParameterBucket


class OffloadedStates:
    """The vectors of one optimizer, by bucket and key.

    Args:
        optimizer: The user's.
        rule: What takes its steps, if anything.
        model: The sharded model.
        store: Where the vectors go.

    Raises:
        ValueError: If its steps cannot be taken chunk by chunk; names the way out.
        OSError: If the tier has no room.
        RuntimeError: If it has none on another rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: UpdateRule | None,
        model: ShardedModel,
        store: ChunkStore,
    ) -> None:
        self._optimizer, self._model, self._store = optimizer, model, store
        self._vectors: dict[int, dict[str, OffloadedVector]] = {}
        self._number = store.new_number()
        self._rule = self._check(rule)
        self._step = StreamedStep(store)
        ops.ensure("cpu")  # wherever the model is
        self.reserve()

    def _check(self, rule: UpdateRule | None) -> UpdateRule:
        name = type(self._optimizer).__name__
        if rule is None or any(rule.vectors(group) is None for group in self._optimizer.param_groups):
            raise ValueError(
                f"offload.optimizer takes steps on the host, a part of a parameter at a time, which {name} cannot: "
                f"{self._why_not(rule)}. Elementwise optimizers of torch.optim can, and your own that are named in "
                "elementwise_optimizers; with others use offload.optimizer: none"
            )
        for bucket, _ in self._trained():
            if bucket.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"offload.optimizer takes no {bucket.dtype} parameters ({bucket.names[0]!r})")
            if bucket.dtype != torch.float32 and not self._model.config.precision.master_weights:
                raise ValueError(
                    "offload.optimizer needs precision.master_weights=True for parameters of low precision"
                )
        return rule

    def _why_not(self, rule: UpdateRule | None) -> str:
        refused = (None if rule is None else rule.refuses(group) for group in self._optimizer.param_groups)
        options = next((each for each in refused if each is not None), None)
        return options or reason_against(self._optimizer) or "its update may need more than the element it changes"

    def _trained(self) -> Iterable[tuple[ParameterBucket, dict[str, Any]]]:
        """Bucket and group of every parameter that may have a gradient; the same on all ranks."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                place = self._model.place(parameter)
                if place is not None and parameter.requires_grad:
                    yield place[0], group

    def prepare(self, rule: UpdateRule | None) -> None:
        """Before a step: take in parameters that were frozen, new groups and changed options. A collective.

        Raises:
            ValueError, OSError, RuntimeError: As for making one.
        """
        self._rule = self._check(rule)
        self.reserve()

    def reserve(self) -> None:
        """Make the vectors that param groups need and have not yet, all together or none. A collective if there are.

        Raises:
            ValueError: If param groups want different states in one bucket.
            OSError: If the tier has no room.
        """
        wanted: dict[str, VectorSpec] = {}
        places: dict[str, tuple[int, str]] = {}
        for bucket, group in self._trained():
            known, numel = self._vectors.get(id(bucket), {}), bucket.owned.stop - bucket.owned.start
            for key, (dtype, fill) in (self._rule.vectors(group) or {}).items():
                name = f"{self._number}/{bucket.names[0]}/{key}"
                spec = VectorSpec(numel, dtype, fill, bucket.device)
                made = known.get(key)
                before: VectorSpec | OffloadedVector = wanted.get(name, spec) if made is None else made
                if (before.dtype, before.fill) != (dtype, fill):
                    raise ValueError(
                        f"param groups of {type(self._optimizer).__name__} keep {key} in "
                        f"{(before.dtype, before.fill)} and {(dtype, fill)} "
                        f"for parameters of the bucket of {bucket.names[0]!r}; with offload.optimizer they "
                        "must be alike"
                    )
                if made is None:
                    wanted[name], places[name] = spec, (id(bucket), key)
        made_now = together(self._model.mesh.control, lambda: self._store.add(wanted)) if wanted else {}
        for name, vector in made_now.items():
            identity, key = places[name]
            self._vectors.setdefault(identity, {})[key] = vector

    def place(self, bucket: ParameterBucket, cut: Piece, key: str, shape: torch.Size) -> OffloadedPart | None:
        """Where a state of one piece lies; None if it is not kept in the tier."""
        vector = self._vectors.get(id(bucket), {}).get(key)
        return None if vector is None else vector.part(cut.offset if cut.numel else 0, shape)

    def step(self, updates: Sequence[Update], scale: float) -> None:
        """Take one step; see `StreamedStep.run`."""
        for update in updates:
            if isinstance(self._rule, OwnSteps):
                self._rule.check_state(update.group, update.state)
            for key, value in update.state.items():
                if is_per_element(value, update.piece.shape) and isinstance(value, Tensor):  # it was frozen until now
                    place = self.place(update.bucket, update.cut, key, update.piece.shape)
                    assert place is not None
                    place.write(value)
                    update.state[key] = place
        self._step.run(self._rule, updates, self._vectors, scale)

    def reduction_begins(self) -> None:
        """A backward begins: read what the next step begins with beside it."""
        self._step.read_ahead()

    def vectors(self) -> Iterator[tuple[ParameterBucket, OffloadedVector]]:
        """All vectors of the state, and whose they are."""
        for bucket in self._model.buckets:
            for vector in self._vectors.get(id(bucket), {}).values():
                yield bucket, vector

    def nbytes(self) -> int:
        """Bytes of all vectors, heads on the device with them."""
        return sum(vector.numel * vector.dtype.itemsize for _, vector in self.vectors())

    @property
    def staging_bytes(self) -> int:
        """Host memory that steps use."""
        return self._step.staging_bytes

    def close(self) -> None:
        """Give the room back; the states are lost."""
        self._step.close()
        self._store.remove([vector for vectors in self._vectors.values() for vector in vectors.values()])
        self._vectors.clear()


def as_tensor(value: Any) -> Any:
    """A state's values, read if they are in a tier."""
    return value.read() if isinstance(value, OffloadedPart) else value


def is_per_element(value: Any, shape: torch.Size) -> bool:
    """Whether a state of a piece of `shape` has a value per element."""
    return isinstance(value, (Tensor, OffloadedPart)) and value.shape == shape and len(value.shape) > 0
