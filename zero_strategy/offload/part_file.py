"""One preallocated file in one directory, record checksums, and the removal of files whose process has ended.

    zero-strategy.<host>.<boot>.<pid>.<start>.<label>.rank<r>.<random>.state

Most files have lost their names before anything is in them (`part_file.py`), so there is little to find: what a process
left that was killed in that moment, and what lies on file systems where an open file must keep its name. A file is
stale if its process is gone: in this boot and PID namespace no process has the number, or one that was started at
another time. Nobody may hold the lock, besides, that a living owner has on its file. Process numbers of another boot or
namespace (a container that shares a directory and a host's name) say nothing: there the lock alone decides, and where
the file system has no locks the file stays. Files of other hosts are left alone.

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
import fcntl
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zero_strategy.offload.file_io import O_DIRECT, REFUSALS, DirectRules, Extent, OpenFile, can_read, direct_rules
from zero_strategy.runtime.host_bytes import PAGE, checksum_of, memory_of
from zero_strategy.watchdog.peers import STARTED, STATE, host, stat_fields


class CorruptRecordError(RuntimeError):
    """A record does not have the bytes that were written."""


class RecordChecksums:
    """A checksum for every range that was written, until another write overlaps it.

    A read checks the ranges that lie in it as a whole; so one that has the same bounds as the writes checks all of it.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, dict[int, tuple[int, str]]] = {}

    def note(self, name: str, start: int, memory: Tensor) -> None:
        """Bytes that are to be written at `start` of a record."""
        stop = start + memory.numel()
        known = self._ranges.setdefault(name, {})
        for begin, (end, _) in list(known.items()):
            if begin < stop and start < end:
                del known[begin]
        if memory.numel():
            known[start] = (stop, _checksum(memory))

    def check(self, name: str, start: int, memory: Tensor, where: str) -> None:
        """Bytes that were read at `start` of a record.

        Raises:
            CorruptRecordError: Naming the record, the bytes and where they lie.
        """
        for begin, (end, wanted) in sorted(self._ranges.get(name, {}).items()):
            if begin < start or end > start + memory.numel():
                continue
            found = _checksum(memory[begin - start : end - start])
            if found != wanted:
                raise CorruptRecordError(
                    f"record {name!r}: bytes {begin} to {end} are not those that were written (checksum {found}, not "
                    f"{wanted}): {where} was changed by something else, the drive lost a write, or the memory was "
                    "changed while it was being written"
                )


def _checksum(memory: Tensor) -> str:
    return checksum_of(memory_of(memory))


_NAME = re.compile(r"zero-strategy\.([^.]+)\.([^.]+)\.(\d+)\.(\d+)\.[^.]*\.rank\d+\.[^.]+\.state")
_UNKNOWN = "unknown"
_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Owner:
    """A process among all of all hosts and times.

    Attributes:
        host: Name of the host.
        boot: Which run of the host's kernel, and which PID namespace in it, or "unknown".
        pid: Number of the process.
        start: When it was started, in ticks since the boot; 0 if unknown.
    """

    host: str
    boot: str
    pid: int
    start: int

    def gone(self) -> bool:
        """True if the process has ended for certain; False for those of other hosts, boots and PID namespaces."""
        here = this_process()
        if self.host != here.host or self.boot != here.boot or here.boot == _UNKNOWN:
            return False
        started = _started(self.pid)
        # 0 is a start that could not be read: no evidence of another process.
        return started is None or (started != self.start and 0 not in (started, self.start))

    def unseen(self) -> bool:
        """True if it ran on a host of this name, but in another boot or PID namespace, or in one that is not known."""
        here = this_process()
        return self.host == here.host and (self.boot != here.boot or here.boot == _UNKNOWN)


def this_process() -> Owner:
    """The one that asks."""
    boot, _, namespace = host().partition(" ")
    if boot:
        boot = f"{boot.replace('-', '')[:16]}-{namespace.strip('pid:[]')}"
    return Owner(_plain(socket.gethostname()) or _UNKNOWN, boot or _UNKNOWN, os.getpid(), _started(os.getpid()) or 0)


def new_name(label: str, rank: int) -> str:
    """A name for a file of this process that no other file has."""
    me = this_process()
    where = f"{me.host}.{me.boot}.{me.pid}.{me.start}"
    return f"zero-strategy.{where}.{_plain(label)}.rank{rank}.{secrets.token_hex(4)}.state"


def owner_of(name: str) -> Owner | None:
    """Maker of the file of this name; None if it is none of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else Owner(found[1], found[2], int(found[3]), int(found[4]))


def lock(fd: int) -> None:
    """Says that the file is in use, as long as it is open; nothing on file systems without locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_stale(directory: Path) -> list[Path]:
    """Removes the state files in a directory whose processes are gone; returns them."""
    removed = []
    for path in sorted(directory.glob("zero-strategy.*.state")):
        owner = owner_of(path.name)
        if owner is None or not (owner.gone() or owner.unseen()):
            continue
        locked = _locked(path)
        if locked or (locked is None and not owner.gone()):
            continue
        with contextlib.suppress(OSError):  # another process has removed it, or it is another user's
            path.unlink()
            removed.append(path)
    return removed


def _locked(path: Path) -> bool | None:
    """True if somebody holds the lock, and not for a moment only: a ring of a killed process ends a little after it.

    None if that cannot be asked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks for writing only what is open for it
    except OSError:
        return None
    end = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    return None
            if time.monotonic() > end:
                return True
            time.sleep(0.01)
    finally:
        os.close(fd)


def _started(pid: int) -> int | None:
    """Start of a process, in ticks since the boot; None if there is none, 0 if that cannot be known."""
    try:
        fields = stat_fields(pid)
        if fields is None:
            return None if Path("/proc/self/stat").exists() else 0
        return None if fields[STATE] in "ZX" else int(fields[STARTED])  # that has ended and only waits for its parent
    except (OSError, IndexError, ValueError):
        return 0


def _plain(text: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "-", text)[:48]


_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartFile:
    """A file for state in a directory, empty until `reserve`.

    Args:
        directory: An existing directory.
        name: From `new_name`.
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
        # In place before anything else can fail, which would leave the name behind.
        self._finalizer = weakref.finalize(self, _discard, [self._fd], self.path, os.getpid())
        # At once: to whoever looks from another container the lock alone says that the file is in use.
        lock(self._fd)
        # By its name, and so before that goes.
        self._open_direct()
        named: Path | None = self.path
        if not keep_name:
            with contextlib.suppress(OSError):
                self.path.unlink()
                named = None
        self._finalizer.detach()
        # Anew, for both descriptors, and without the name where that has gone.
        fds = [fd for fd in (self._fd, self._direct) if fd >= 0]
        self._finalizer = weakref.finalize(self, _discard, fds, named, os.getpid())
        if hasattr(os, "posix_fadvise"):  # what goes through the page cache are ends of records: nothing is read next
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def alignment(self) -> int:
        """Multiples of bytes at which transfers should begin."""
        return self.rules.offset if self.rules is not None else 1

    def free_bytes(self) -> int:
        """Bytes that this process may still take of the file system."""
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
        # Only now are there bytes to read, and some file systems refuse direct I/O when they are read, not when opened.
        if nbytes and self.rules is not None and not can_read(self._direct, self.rules):
            self.rules = None

    def extents(self, memory: Tensor, offset: int) -> list[Extent]:
        """Write bytes of memory to a range of the file: past the page cache as far as both lie right.

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
        if code in _CANNOT_RESERVE:  # a full disk is then an error of the write that meets it
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
