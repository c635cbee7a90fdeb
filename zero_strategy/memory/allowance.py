"""Host memory for the first chunks of what is else in files (`offload.resident_bytes`).

    allowance |== parameters, unit by unit ==|== reduced gradients ==|   in this order, in whole chunks
              chunks that fit stay in memory, from the first of each vector on; the others are records of files

The engine and the plan ask in the same order, so that both know which chunks those are.
"""

from __future__ import annotations

from collections.abc import Iterable

PAGE_BYTES = 4096
"""Chunks are accounted for in pages."""


class Allowance:
    """Bytes that are given away, first come first served.

    Args:
        nbytes: How many there are.

    Attributes:
        left: Those that nobody has.
    """

    def __init__(self, nbytes: int) -> None:
        assert nbytes >= 0
        self.left = nbytes

    def take(self, sizes: Iterable[int]) -> int:
        """How many of the first chunks of these sizes, in bytes, stay in memory; their bytes are taken."""
        count = 0
        for size in sizes:
            pages = _whole_pages(size)
            if pages > self.left:
                break
            self.left -= pages
            count += 1
        return count

    def give_back(self, sizes: Iterable[int]) -> None:
        """Return the bytes of chunks that stayed."""
        self.left += sum(map(_whole_pages, sizes))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
