"""Ranges of vectors in tiers: what stands where a tensor would be, and a look at many of them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_strategy.memory.chunk_pass import Chunk

if TYPE_CHECKING:
    from zero_strategy.memory.vectors import OffloadedVector

_ONLY = "values"
_KEYS = frozenset({_ONLY})


class OffloadedPart:
    """What stands for a tensor whose values are in a tier.

    Attributes:
        vector: Of which it is a part.
        start: Its first element there.
        shape: Of the tensor.
        powers: What is known of its values without reading them: p, the sum of |x| ** p in float64 (inf: the largest
            |x|), and how many x are not finite.
    """

    def __init__(self, vector: OffloadedVector, start: int, shape: torch.Size) -> None:
        self.vector, self.start, self.shape = vector, start, shape
        self.powers: tuple[float, float, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.vector.dtype

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        return self.vector.read(self.start, self.start + self.numel()).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        self.vector.write(self.start, values)

    def narrow(self, start: int, stop: int) -> OffloadedPart:
        """Elements [start, stop) of it, flat."""
        return self.vector.part(self.start + start, (stop - start,))


def visit(parts: Sequence[OffloadedPart], look: Callable[[list[int], list[Tensor]], object]) -> None:
    """Look at values in order of where they lie, as few at once as a chunk has; the next chunk is read meanwhile.

    Args:
        parts: In any order.
        look: Takes positions in `parts`, and for each a flat view of some of its values, not to be written to.
    """
    by_vector: dict[int, tuple[OffloadedVector, dict[int, list[int]]]] = {}
    for position, part in enumerate(parts):
        _, places = by_vector.setdefault(id(part.vector), (part.vector, {}))
        for number, *_ in part.vector.cuts.overlapping(part.start, part.start + part.numel()):
            places.setdefault(number, []).append(position)
    for vector, places in by_vector.values():

        def show(chunk: Chunk, held: dict[str, Tensor], places: dict[int, list[int]] = places) -> None:
            found = []
            for position in places[chunk.number]:
                part = parts[position]
                low, high = max(chunk.start, part.start), min(chunk.stop, part.start + part.numel())
                found.append(held[_ONLY][low - chunk.start : high - chunk.start])
            look(places[chunk.number], found)

        with vector.store.lock:
            vector.store.flush()
        chunks = [
            Chunk(number, *vector.chunks[number], {_ONLY: vector}, unchanged=_KEYS) for number in sorted(places)
        ]
        with vector.store.transferring:
            vector.store.transfers.run(chunks, show)
