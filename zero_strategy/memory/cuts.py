"""Where the vectors of a bucket are cut into chunks, all alike.

    elements  |------------- head -------------|-------------- the rest --------------|
    chunks    |-- 0 --|-- 1 --|-- 2 --|-- 3 ---|-- 4 --|-- 5 --|-- 6 --|-- 7 --|- 8 --|

The head is what `offload.optimizer_ratio` leaves on the device; a chunk lies in the head or in the rest, never in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64
"""Elements that a head is a multiple of, so that what is updated on the host begins at a cache line in every dtype."""


@dataclass(frozen=True)
class Cuts:
    """Cuts of vectors of one length.

    Attributes:
        numel: Elements.
        size: Elements of a chunk; the last ones of head and rest may have fewer.
        head: Elements of the head.
    """

    numel: int
    size: int
    head: int = 0

    def __post_init__(self) -> None:
        assert self.size > 0 and 0 <= self.head <= self.numel

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of every chunk."""
        return [
            (start, min(start + self.size, stop))
            for begin, stop in ((0, self.head), (self.head, self.numel))
            for start in range(begin, stop, self.size)
        ]

    @property
    def heads(self) -> int:
        """Chunks of the head."""
        return -(-self.head // self.size)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Chunks that hold elements [start, stop): number, first and one-past-last of them, first of the chunk."""
        assert 0 <= start <= stop <= self.numel
        number = self._number(start)
        while start < stop:
            begin, end = self.chunks[number]
            yield number, start, min(stop, end), begin
            start, number = end, number + 1

    def _number(self, element: int) -> int:
        if element < self.head:
            return element // self.size
        return self.heads + (element - self.head) // self.size


def head_numel(numel: int, ratio: float) -> int:
    """Elements of `numel` that stay on the device where `ratio` of them shall not: a multiple of `ALIGNMENT`."""
    return numel if ratio == 0 else min(numel, int(numel * (1.0 - ratio)) // ALIGNMENT * ALIGNMENT)
