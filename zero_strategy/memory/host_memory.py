"""Host memory that drives and devices copy from and to: one mapping of exact size, for as long as it is used.

Large pages where the kernel has them: I/O past the page cache looks up and holds every page. Forked children do not get
it: a transfer under way and a copy-on-write of its pages would put bytes where nobody looks. Pinned by registering the
mapping with CUDA; torch's own pinned allocator rounds up to powers of two and keeps what is freed.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch
from torch import Tensor

from zero_strategy.runtime.aligned import PAGE


class HostMemory:
    """Bytes at the beginning of a page.

    Args:
        nbytes: Rounded up to whole pages.
        pinned: Register them with CUDA, so that copies are asynchronous.

    Attributes:
        bytes: uint8, 1-D, of `nbytes` bytes.
        pinned: Whether they are registered.
        reason: Why not, if that was asked for.

    Raises:
        ValueError: If `nbytes` is not positive.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        if nbytes <= 0:
            raise ValueError(f"host memory needs a positive number of bytes, got {nbytes}")
        self.nbytes = self.rounded(nbytes)
        mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # a kernel without it
                mapping.madvise(getattr(mmap, advice))
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.pinned, self.reason = False, ""
        if pinned:
            self._pin()

    @staticmethod
    def rounded(nbytes: int) -> int:
        """What `nbytes` take: whole pages."""
        return -(-nbytes // PAGE) * PAGE

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            self.reason = "this torch sees no CUDA device"
            return
        address = self.bytes.data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
        if code:
            self.reason = f"cudaHostRegister of {self.nbytes} bytes failed with error {code}"
            return
        self.pinned = True
        # Holds the mapping, so that it is not unmapped before it is unregistered.
        weakref.finalize(self, _unpin, self.bytes)


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
