"""What a file system wants of I/O past the page cache (O_DIRECT): asked of the kernel, and tried.

statx(2) tells the alignments from Linux 6.1 on, for file systems that know. Else they are taken to be a page, and a
read shows whether that is enough.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from zero_strategy.runtime.aligned import PAGE, AlignedArena
from zero_strategy.runtime.transfer import memory_of

O_DIRECT = getattr(os, "O_DIRECT", 0)
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_FIELDS_AT = 152
"""Of stx_dio_mem_align and stx_dio_offset_align in struct statx."""


@dataclass(frozen=True)
class DirectRules:
    """At what multiples of bytes memory must begin, and file offsets and lengths be."""

    memory: int
    offset: int


def direct_rules(fd: int) -> DirectRules | None:
    """What a descriptor that was opened with O_DIRECT asks for; None if the file system says that it cannot."""
    statx: Callable[..., int] | None = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return DirectRules(PAGE, PAGE)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
        return DirectRules(PAGE, PAGE)
    (mask,) = struct.unpack_from("=I", found.raw)
    if not mask & _STATX_DIOALIGN:  # an older kernel, or a file system that does not say
        return DirectRules(PAGE, PAGE)
    memory, offset = struct.unpack_from("=II", found.raw, _FIELDS_AT)
    return DirectRules(memory, offset) if memory and offset else None


def can_read(fd: int, rules: DirectRules) -> bool:
    """Whether a read by these rules works; the file must not be empty.

    Raises:
        OSError: If it fails for another reason.
    """
    nbytes, arena = max(rules.offset, PAGE), AlignedArena()
    arena.reserve(nbytes + rules.memory)
    memory = arena.take(nbytes + rules.memory, 0)
    memory = memory[-memory.data_ptr() % rules.memory :][:nbytes]
    try:
        os.preadv(fd, [memory_of(memory)], 0)
    except OSError as error:
        if error.errno in REFUSALS:
            return False
        raise
    return True
