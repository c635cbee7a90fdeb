"""Blocks of host memory: in malloc's heap, where freed ones leave gaps, or each mapped on its own.

glibc maps blocks from a threshold on, 128 KiB at first, which grows to the size of any mapped block that is freed, up
to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). A fixed threshold keeps blocks apart: memory goes back as it is freed, and
each block takes time for its pages.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

MAPPED = 128 << 10
"""Threshold, in bytes: that with which glibc begins."""
LARGEST = 32 << 20
"""Bytes from which glibc maps every block."""
_SMALL = 1 << 20
"""Bytes of blocks that leave no gaps that count."""
_M_MMAP_THRESHOLD = -3
_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


def is_open() -> bool:
    """True if a process may set the threshold: it has glibc, and the environment says nothing of it."""
    return _is_glibc() and _VARIABLE not in os.environ


def is_mapped(threshold: int) -> bool:
    """True if all but small blocks are mapped where a run has this threshold (0: none), or the environment one."""
    given = os.environ.get(_VARIABLE, "")
    threshold = threshold or (int(given) if given.isdigit() else 0)
    return 0 < threshold <= _SMALL


def map_blocks(threshold: int) -> bool:
    """Map blocks of so many bytes or more, in the whole process from now on; False if malloc is not glibc's."""
    return _is_glibc() and bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, threshold))


def trim() -> None:
    """Give what is free in the heap back to the system, as far as it can be."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def free_in_heap() -> int:
    """Bytes that are free in the heap, for blocks that find a place there; 0: nobody knows."""
    if not _is_glibc() or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return 0
    call = ctypes.CDLL(None).mallinfo2
    call.restype = _Mallinfo
    found: int = call().fordblks
    return found


class _Mallinfo(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@functools.cache
def _is_glibc() -> bool:
    others = any(name in os.environ.get("LD_PRELOAD", "") for name in ("jemalloc", "tcmalloc", "mimalloc"))
    return platform.libc_ver()[0] == "glibc" and not others
