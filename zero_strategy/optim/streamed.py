"""The optimizer step on the host, where state is in a tier: chunk by chunk, read ahead and written behind.

Memory is that of a few chunks (`memory.chunk_pass`), whatever the size of the model. New weights go straight into the
parameters. Chunks in host memory are updated where they lie, and those whose state is kept on the device
(`offload.optimizer_ratio`), there. Every update rule that works element by element gives the same bits as with all of
its state on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.memory.chunk_pass import Chunk, ChunkSlots
from zero_strategy.memory.chunked import ChunkStore, OffloadedPart, OffloadedVector
from zero_strategy.memory.opening import SLOTS
from zero_strategy.optim.update_rules import Segment, UpdateRule
from zero_strategy.sharding.layout import Piece
from zero_strategy.sharding.parameters import ParameterBucket

MASTER, WEIGHTS, GRADIENT = "master weights", "weights", "gradient"
"""Keys of a chunk's vectors beside those of the optimizer's state."""
_HOST = torch.device("cpu")


@dataclass
class Update:
    """What a step does to this rank's part of one parameter.

    Attributes:
        group: Its param group.
        parameter: The module's parameter.
        piece: What the optimizer sees of it.
        bucket: Where it lies.
        cut: Its part of the bucket's owned elements.
        gradient: Flat; where gradients are in a tier, what stands for it.
        factor: What the gradient is multiplied by first.
        state: Numbers, and `OffloadedPart` in the place of tensors; empty before the first step.
    """

    group: dict[str, Any]
    parameter: nn.Parameter
    piece: nn.Parameter
    bucket: ParameterBucket
    cut: Piece
    gradient: Tensor | OffloadedPart
    factor: float
    state: dict[str, Any]


@dataclass
class _Work(Chunk):
    """What is updated in a chunk; with the state of one `on_device`, where the bucket is."""

    on_device: bool = False
    updates: list[Update] = field(default_factory=list)


class StreamedStep:
    """Carries steps out for one optimizer.

    Args:
        store: Where its state is.
        copies: Treat every bucket as on a device whose memory the host cannot use.
    """

    def __init__(self, store: ChunkStore, copies: bool = False) -> None:
        self._store, self._copies, self._slots = store, copies, ChunkSlots(SLOTS)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that steps have taken."""
        return self._slots.nbytes

    @torch.no_grad()
    def run(
        self, rule: UpdateRule, updates: Sequence[Update], vectors: dict[int, dict[str, OffloadedVector]], scale: float
    ) -> None:
        """Take one step.

        Args:
            rule: An elementwise one.
            updates: All that it changes.
            vectors: By the id of a bucket: those of the optimizer's state, by key.
            scale: What gradients are multiplied by first.

        Raises:
            OSError: If the tier fails. Some chunks have then taken the step and others have not: state in files is
            refused until a checkpoint is loaded.
        """
        chunks = self._chunks(updates, vectors)
        for store in {vector.store for chunk in chunks for vector in chunk.vectors.values()}:
            store.flush()  # weights may be in another tier than what updates them
        steps: dict[int, dict[str, Any]] = {}
        self._slots.run(chunks, lambda chunk, held: self._update(rule, chunk, held, scale, steps))
        for update in updates:
            if update.cut.numel == 0:
                steps[id(update.parameter)] = _count_only(rule, update, scale)
            update.state.update(steps[id(update.parameter)])

    def _chunks(
        self, updates: Sequence[Update], vectors: dict[int, dict[str, OffloadedVector]]
    ) -> list[_Work]:
        """Those that hold something to update, in the order of buckets and elements."""
        found: dict[tuple[int, int], _Work] = {}
        for update in updates:
            bucket, cut = update.bucket, update.cut
            cuts = self._store.cuts(bucket.owned.stop - bucket.owned.start)
            for number, *_ in cuts.overlapping(cut.offset, cut.offset + cut.numel) if cut.numel else ():
                key = (id(bucket), number)
                if key not in found:
                    held = dict(vectors.get(id(bucket), {}))
                    if bucket.master_vector is not None:
                        held[MASTER] = bucket.master_vector
                    if bucket.shard_vector is not None:
                        held[WEIGHTS] = bucket.shard_vector
                    if isinstance(update.gradient, OffloadedPart):
                        held[GRADIENT] = update.gradient.vector
                    place, on_device = cuts.chunks[number], number < cuts.heads
                    found[key] = _Work(number, *place, held, unchanged=frozenset([GRADIENT]), on_device=on_device)
                found[key].updates.append(update)
        return list(found.values())

    def _update(
        self, rule: UpdateRule, chunk: Chunk, held: dict[str, Tensor], scale: float, steps: dict[int, dict[str, Any]]
    ) -> None:
        assert isinstance(chunk, _Work)
        segments, back = [], []
        for update in chunk.updates:
            low, high = _overlap(update, chunk)
            here = slice(low - chunk.start, high - chunk.start)
            home = update.bucket.device if chunk.on_device else _HOST
            weights = held[WEIGHTS][here] if WEIGHTS in held else update.bucket.owned_values[low:high]
            if weights.device != home or (self._copies and chunk.on_device == (WEIGHTS in held)):
                away, weights = weights, weights.to(home, copy=True)
                back.append((away, weights))
            parts = {key: values[here] for key, values in held.items()}
            segments.append(_segment(update, low, high, weights, parts, home))
        rule.update(segments, scale)
        for away, weights in back:
            away.copy_(weights)
        for update, segment in zip(chunk.updates, segments, strict=True):
            low, _ = _overlap(update, chunk)
            numbers = {}
            for key, value in segment.state.items():
                if key not in chunk.vectors:
                    numbers[key] = value
                    continue
                place = held[key][low - chunk.start :][: value.numel()]
                if value.data_ptr() != place.data_ptr():  # made in this step
                    place.copy_(value)
                numbers[key] = chunk.vectors[key].part(update.cut.offset, update.piece.shape)
            steps[id(update.parameter)] = numbers


def _overlap(update: Update, chunk: _Work) -> tuple[int, int]:
    """The owned elements of an update that lie in a chunk."""
    return max(chunk.start, update.cut.offset), min(chunk.stop, update.cut.offset + update.cut.numel)


def _segment(
    update: Update, low: int, high: int, weights: Tensor, held: dict[str, Tensor], home: torch.device
) -> Segment:
    """Elements [low, high) of the owned ones as the rule takes them, on the device `home`."""
    state = {
        key: held[key] if isinstance(value, OffloadedPart) else value.clone() if isinstance(value, Tensor) else value
        for key, value in update.state.items()
    }
    param, copy = (held[MASTER], weights) if MASTER in held else (weights, None)
    if isinstance(update.gradient, Tensor):
        gradient = update.gradient[low - update.cut.offset : high - update.cut.offset].to(home)
    else:
        gradient = held[GRADIENT].to(home)
    return Segment(
        update.group, param, gradient, state, like=param, copy=copy, scale=update.factor, owner=update.parameter
    )


def _count_only(rule: UpdateRule, update: Update, scale: float) -> dict[str, Any]:
    """The step of a piece without elements: its numbers move on as those of others do."""
    state = {
        key: torch.empty(0, dtype=value.dtype) if isinstance(value, OffloadedPart) else value
        for key, value in update.state.items()
    }
    empty = torch.empty(0)
    rule.update([Segment(update.group, empty, empty, state, like=empty, owner=update.parameter)], scale)
    return {
        key: value.view(update.piece.shape) if isinstance(value, Tensor) and value.numel() == 0 else value
        for key, value in state.items()
    }
