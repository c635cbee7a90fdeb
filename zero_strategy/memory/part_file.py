"""One file in one directory: its space is reserved, its name is gone, and it is opened past the page cache if possible.

The name is removed right after opening. The bytes then live as long as the descriptor, and the kernel frees them
however the process ends, SIGKILL and power included: nothing has to be cleaned up later, and nobody can open the file
by mistake. `lsof +L1` still shows it with its name, size and process. Where a file system refuses to remove an open
file, or `keep_name` asks for it, the name goes on close, at exit, or by the next run that finds it stale.

Dropped: O_TMPFILE (not on all file systems, and the file has no name that would tell whose it is), and one file per
record (a thousand files to reserve, and a directory that only a sweeper can clean).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from zero_strategy.memory import ownership
from zero_strategy.memory.direct_io import O_DIRECT, REFUSALS, DirectRules, can_read, direct_rules
from zero_strategy.memory.file_queue import Extent, OpenFile
from zero_strategy.runtime.aligned import PAGE

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartFile:
    """A file for state in a directory, empty until `reserve`.

    Args:
        directory: An existing directory.
        name: From `ownership.new_name`.
        keep_name: Leave the name in the directory until the file is closed.

    Attributes:
        path: Where it is, or was.
        rules: For I/O past the page cache, or None where the file system refuses that.

    Raises:
        OSError: If it cannot be made; names it.
    """

    def __init__(self, directory: Path, name: str, *, keep_name: bool = False) -> None:
        self.path = directory / name
        self.rules: DirectRules | None = None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._direct = -1
        self._finalizer = weakref.finalize(self, _discard, [self._fd], self.path, os.getpid())
        ownership.lock(self._fd)
        self._open_direct()
        named: Path | None = self.path
        if not keep_name:
            with contextlib.suppress(OSError):
                self.path.unlink()
                named = None
        self._finalizer.detach()
        fds = [fd for fd in (self._fd, self._direct) if fd >= 0]
        self._finalizer = weakref.finalize(self, _discard, fds, named, os.getpid())
        if hasattr(os, "posix_fadvise"):  # what goes through the page cache are ends of records: nothing is read next
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def alignment(self) -> int:
        """At what multiples of bytes transfers should begin."""
        return self.rules.offset if self.rules is not None else 1

    def free_bytes(self) -> int:
        """What this process may still take of the file system."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def reserve(self, nbytes: int) -> None:
        """Takes the space on the disk, once; it reads as zeros.

        Raises:
            OSError: If there is not enough: with the bytes needed, the bytes free, the directory, and what to do.
        """
        free = self.free_bytes()
        if nbytes > free:
            raise self._full(errno.ENOSPC, nbytes, free)
        try:
            os.ftruncate(self._fd, nbytes)
            _allocate(self._fd, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)  # what it has got is others' again
            if error.errno in _NO_ROOM:
                raise self._full(error.errno, nbytes, self.free_bytes()) from error
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if nbytes and self.rules is not None and not can_read(self._direct, self.rules):
            self.rules = None

    def extents(self, memory: Tensor, offset: int) -> list[Extent]:
        """How bytes of memory get to a range of the file: past the page cache as far as both lie right.

        Args:
            memory: uint8, 1-D, on the CPU.
            offset: A multiple of `alignment`.
        """
        rules = self.rules
        plain = OpenFile(self._fd, str(self.path))
        if rules is None or memory.data_ptr() % rules.memory:
            return [Extent(plain, memory, offset)]
        # The cut is between pages of the page cache: one that is partly written around it would be written back whole.
        whole = memory.numel() - memory.numel() % max(rules.offset, PAGE)
        direct = OpenFile(self._direct, str(self.path), rules.offset)
        found = [Extent(direct, memory[:whole], offset), Extent(plain, memory[whole:], offset + whole)]
        return [extent for extent in found if extent.memory.numel()]

    def close(self) -> None:
        """Lets the file go, and its name if it still has one. Nothing may be under way."""
        self._finalizer()

    def _open_direct(self) -> None:
        if not O_DIRECT:
            return
        try:
            self._direct = os.open(self.path, os.O_RDWR | O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in REFUSALS:
                self._finalizer()
                raise
        else:
            self.rules = direct_rules(self._direct)

    def _full(self, code: int | None, needed: int, free: int) -> OSError:
        why = os.strerror(code or errno.ENOSPC)
        return OSError(
            code or errno.ENOSPC,
            f"{why}: the state needs {needed:,} bytes here, and {free:,} are free; make room, name another directory "
            "or several to divide it among (offload.nvme_path), or "
            "keep it in memory (offload.optimizer: cpu)",
            str(self.path.parent),
        )


def _allocate(fd: int, nbytes: int) -> None:
    """Not `os.posix_fallocate`: where the file system cannot reserve, that writes zeros everywhere."""
    fallocate: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or nbytes == 0:
        return
    while fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT_RESERVE:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _discard(fds: list[int], named: Path | None, process: int) -> None:
    if os.getpid() != process:  # a forked child's exit leaves its parent's file alone
        return
    if named is not None:
        with contextlib.suppress(OSError):
            named.unlink()
    for fd in fds:
        os.close(fd)
