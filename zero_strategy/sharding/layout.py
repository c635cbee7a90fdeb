"""The layout of a bucket: where each parameter lies, and which elements each rank owns.

Pure arithmetic: no tensors are allocated and no processes are needed.

    bucket (numel = world_size x slice_numel)
    |<------ rank 0 ------>|<------ rank 1 ------>|
    [ w0 .. ][gap][ b0 ][gap][ w1 ........ ][ pad ]
     ^ every parameter starts on an `align` boundary, so does every rank's slice

Elements keep their row-major order, so a rank's part of a parameter is one contiguous range of that parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN_BYTES = 128
"""Every parameter and every slice starts on this boundary: a cache line pair, and two AVX-512 vectors."""


@dataclass(frozen=True)
class Segment:
    """One parameter inside a bucket.

    Attributes:
        name: The parameter's name in the module (its first name when it is tied).
        shape: Its logical shape.
        offset: Index of its first element in the bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d parameter, 0 for a zero-size one."""
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """Index one past its last element in the bucket."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The contiguous part of one parameter that one rank owns.

    Attributes:
        index: Position of the parameter in the bucket's segments.
        start: First owned element, counted in the flattened parameter.
        stop: One past the last owned element, counted in the flattened parameter.
        offset: The first owned element, counted from the start of the rank's owned range.
    """

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of owned elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """Segments of one bucket and its equal division among `world_size` ranks.

    Attributes:
        segments: The parameters, in order.
        numel: Padded number of elements, a multiple of `world_size * align`.
        align: Alignment in elements.
        world_size: Number of slices.
    """

    segments: tuple[Segment, ...]
    numel: int
    align: int
    world_size: int

    @property
    def slice_numel(self) -> int:
        """Elements per rank."""
        return self.numel // self.world_size

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last bucket element of `rank`'s slice."""
        assert 0 <= rank < self.world_size
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of parameters inside bucket elements [start, stop), in order.

        A zero-size parameter is given, as an empty piece, to the one range that holds its offset
        (to the first range when the bucket is empty).
        """
        found = []
        for index, segment in enumerate(self.segments):
            if segment.numel == 0:
                last = start < stop == self.numel and segment.offset == stop
                if start <= segment.offset < stop or last or (self.numel == 0 and start == 0):
                    found.append(Piece(index, 0, 0, min(segment.offset, stop) - start))
                continue
            low, high = max(start, segment.offset), min(stop, segment.stop)
            if low < high:
                found.append(Piece(index, low - segment.offset, high - segment.offset, low - start))
        return tuple(found)


def build_layout(
    named_shapes: Sequence[tuple[str, tuple[int, ...]]], itemsize: int, world_size: int, replicas: int = 1
) -> BucketLayout:
    """Lay parameters of one dtype out in one bucket.

    Args:
        named_shapes: (name, shape) of each parameter, in the order they take in the bucket.
        itemsize: Bytes per element of the parameters' dtype. Buffers of wider dtypes (fp32 gradients of bf16
            parameters) use the same element offsets and so are aligned as well.
        world_size: Number of equal slices.
        replicas: Ranks that hold the same slice; each slice divides evenly among them as well.

    Raises:
        ValueError: If a name occurs twice.
    """
    if len({name for name, _ in named_shapes}) != len(named_shapes):
        raise ValueError(f"a parameter name occurs twice in one bucket: {[name for name, _ in named_shapes]}")
    align = max(1, ALIGN_BYTES // itemsize)
    offset, segments = 0, []
    for name, shape in named_shapes:
        segments.append(Segment(name, tuple(shape), offset))
        offset += round_up(segments[-1].numel, align)
    return BucketLayout(tuple(segments), round_up(offset, align * world_size * replicas), align, world_size)


def cuts(pieces: Sequence[Piece], numel: int) -> tuple[list[int], list[tuple[int, int]]]:
    """How `torch.split` cuts a rank's owned elements into its pieces.

    Args:
        pieces: All of the range, in order.
        numel: Its elements.

    Returns:
        Lengths, those of gaps too; and (index of a parameter, number of its length).
    """
    sizes: list[int] = []
    places: list[tuple[int, int]] = []
    end = 0
    for piece in pieces:
        places.append((piece.index, len(sizes) + 1))
        sizes += [piece.offset - end, piece.numel]
        end = piece.offset + piece.numel
    return [*sizes, numel - end], places


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
