"""Host memory at page boundaries, of exactly the pages that are needed."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE = 4096
"""Bytes; a multiple of the logical block size of any disk in use."""


def page_memory(nbytes: int) -> Tensor:
    """Zeroed memory of `nbytes` at a page boundary, given back with its last view.

    Returns:
        uint8, 1-D. The kernel may keep it in large pages: a write past the page cache looks every page up.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
