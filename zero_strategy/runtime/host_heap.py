"""How malloc keeps blocks of host memory: in its heap, where freed ones leave gaps, or each mapped on its own.

glibc maps blocks from a threshold on, 128 KiB at first, which grows to the size of any mapped block that is freed, up
to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). A fixed threshold keeps blocks apart: memory goes back as it is freed, and
each block takes time for its pages.
"""

from __future__ import annotations

import ctypes
import os
import platform

MAPPED = 128 << 10
"""Threshold, in bytes: that with which glibc begins."""
LARGEST = 32 << 20
"""Bytes from which glibc maps every block."""
_M_MMAP_THRESHOLD = -3
_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


def is_open() -> bool:
    """True if a process may set the threshold: it has glibc, and the environment says nothing of it."""
    return platform.libc_ver()[0] == "glibc" and _VARIABLE not in os.environ


def is_mapped(threshold: int) -> bool:
    """True if blocks are mapped where a run has this threshold (0: none), by it or by the environment."""
    return bool(threshold) or _VARIABLE in os.environ


def map_blocks(threshold: int) -> bool:
    """Map blocks of so many bytes or more, in the whole process from now on; False if malloc is not glibc's."""
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, threshold))
