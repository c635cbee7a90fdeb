"""Host memory at chosen addresses: what is written past the page cache must lie as its place in the file does.

A write with O_DIRECT needs its memory, its file offset and its length at multiples of the page size (open(2)). Memory
whose address is congruent to the file offset lets all whole pages of a range be written without another copy.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

PAGE = 4096
"""Bytes; a multiple of the logical block size of any disk in use."""


class AlignedArena:
    """One reusable stretch of host memory that hands out views at addresses congruent to given offsets.

    Args:
        pinned: page-locked memory, for copies from a CUDA device.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._at = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Begins anew with room for `nbytes`; all earlier views are given up. It never shrinks."""
        self._at = 0
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            if self._pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = _in_large_pages(nbytes)

    def take(self, nbytes: int, offset: int) -> torch.Tensor:
        """The next `nbytes` whose address is congruent to `offset` modulo a page.

        Returns:
            uint8, 1-D; its content is whatever was there.
        """
        lead = (offset - self._memory.data_ptr() - self._at) % PAGE
        begin = self._at + lead
        assert begin + nbytes <= self._memory.numel(), "reserve more"
        self._at = begin + nbytes
        return self._memory[begin : begin + nbytes]


def _in_large_pages(nbytes: int) -> torch.Tensor:
    """Memory that the kernel may keep in large pages: a write past the page cache looks every page up and holds it."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def is_aligned(memory: torch.Tensor, offset: int) -> bool:
    """Whether CPU memory lies as bytes at `offset` of a file do."""
    return (memory.data_ptr() - offset) % PAGE == 0
