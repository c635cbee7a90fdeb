"""Parts of a tensor that single ranks wrote, as far as a checkpoint tells.

A checkpoint in pieces says which rank wrote which elements. An ordinary one has checksums of blocks, none of which goes
across two ranks' elements, and no ranks. Blocks also end at multiples of `BLOCK_BYTES`, which says nothing. Where as
many parts are there as ranks saved, part r is rank r's, unless ranks divided layers as well; that cannot be where the
number of ranks is a prime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import FileKind, Manifest
from zero_strategy.checkpoint.ranges import BLOCK_BYTES
from zero_strategy.checkpoint.reader import StateReader


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a flattened tensor that one rank wrote.

    Attributes:
        start, stop: Its elements.
        rank: The rank; None where nothing tells.
        certain: False where the rank is that of the usual order, and not recorded.
        number, count: Place among the tensor's parts, from 1, and how many there are.
        of_several: The rank is known, and other ranks wrote other tensors.
    """

    start: int
    stop: int
    rank: int | None = None
    certain: bool = True
    number: int = 1
    count: int = 1
    of_several: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def writer(self) -> str:
        """The rank, as far as it is known."""
        if self.rank is not None:
            return f"rank {self.rank}" if self.certain else f"rank {self.rank} (if ranks divide tensors in their order)"
        return f"one rank ({'not recorded which' if self.count == 1 else f'number {self.number} of {self.count}'})"


def parts_of(reader: StateReader, spec: TensorSpec, kind: FileKind) -> list[Part]:
    """The parts of a tensor, in order; one for each rank that wrote consecutive elements.

    Args:
        reader: The open checkpoint.
        spec: The tensor, under the name that it is stored by.
        kind: Weights, or which state.

    Returns:
        Parts that together are the tensor; none where the checkpoint does not tell: other formats, plain weights, and
        tensors without elements.
    """
    if not reader.has_manifest or not spec.numel:
        return []
    manifest, path = reader.manifest, file_of(reader.manifest, spec.name, kind)
    if manifest.pieces is not None:
        slices = manifest.pieces.slices.get(path, {}).get(spec.name, [])
        ranks = [one.rank for one in slices]
        return _numbered(
            [(one.start, one.stop) for one in slices], ranks, certain=True, of_several=manifest.world_size > 1
        )
    blocks = manifest.checksums.tensors.get(path, {}).get(spec.name, [])
    most = BLOCK_BYTES // spec.dtype.itemsize
    starts = [block.start for block in blocks if block.start % most or block.start == 0]
    bounds = list(pairwise([*starts, spec.numel])) if blocks else []
    world = manifest.world_size
    known: list[int | None] = list(range(world)) if len(bounds) == world else [None] * len(bounds)
    return _numbered(bounds, known, certain=_has_no_divisor(world))


def file_of(manifest: Manifest, name: str, kind: FileKind) -> str:
    """The file of a tensor, among those that are listed; of pieces the one that merging makes of them."""
    return manifest.weights[name].file if kind == "model" else manifest.optimizers[kind[0]].states[kind[1]]


def _numbered(
    bounds: Sequence[tuple[int, int]], ranks: Sequence[int | None], *, certain: bool, of_several: bool = False
) -> list[Part]:
    """Parts of ranges in order; neighbours of one rank are one part."""
    joined: list[tuple[int, int, int | None]] = []
    for (start, stop), rank in zip(bounds, ranks, strict=True):
        if joined and rank is not None and joined[-1][2] == rank:
            start = joined.pop()[0]
        joined.append((start, stop, rank))
    return [
        Part(start, stop, rank, certain, number, len(joined), of_several)
        for number, (start, stop, rank) in enumerate(joined, 1)
    ]


def _has_no_divisor(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
