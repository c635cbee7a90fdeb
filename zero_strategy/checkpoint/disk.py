"""Writes past the page cache at the disk's speed, bounded pace, and durable renames.

After each call the change survives a loss of power.

Names beside a target `T` while it is being saved under a token `k`:

    .T.k.tmp   being written; after an exchange what T was before, until it is removed
    .T.k.old   what T was before, where the file system cannot exchange two names

    source tensors --copy--> chunk (aligned, 4 MiB) --O_DIRECT, by I/O threads--> disk

Bytes arrive in the order of their ranges and are put together into chunks that end at multiples of CHUNK_BYTES of the
file. Partial pages at the ends of a range go through the page cache, for another range, or another rank, may have the
rest of the page. Where a file system refuses O_DIRECT, everything goes through the page cache.

Dropped: the page cache with an fsync at the end (0.4 to 0.6 of the disk's speed, and it evicts what others need), and
mapping the files (page faults, and a full disk is a SIGBUS).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import re
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from zero_strategy.offload.tier import HostMemory
from zero_strategy.runtime.host_bytes import PAGE, AlignedArena, Seen, as_bytes, is_aligned, memory_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Pace:
    """Keeps the average speed under a bound.

    Args:
        bytes_per_second: The bound; None for none.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._speed = bytes_per_second
        self._due = 0.0

    def wait(self, nbytes: int) -> None:
        """Returns when the next `nbytes` may be written."""
        if self._speed is None:
            return
        now = time.monotonic()
        if self._due > now:
            time.sleep(self._due - now)
        # Counted from now at the earliest: a pause earns no burst after it.
        self._due = max(self._due, now) + nbytes / self._speed


# Both from Linux's headers; Python has no call for the exchange of two names.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TOKEN = r"[A-Za-z0-9_-]+"  # no dot, so that the names of targets "a" and "a.b" cannot be confused


def beside(target: Path, token: str, suffix: str) -> Path:
    """The sibling `.{target}.{token}.{suffix}` of a target.

    Raises:
        ValueError: if the token has other characters than letters, digits, "_" and "-".
    """
    if not re.fullmatch(_TOKEN, token):
        raise ValueError(f"token {token!r} may have only letters, digits, '_' and '-'")
    return target.parent / f".{target.name}.{token}.{suffix}"


def all_beside(target: Path, suffix: str) -> list[Path]:
    """All such siblings, of any token, oldest first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{_TOKEN}\.{re.escape(suffix)}")
    try:
        names = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return by_age(names)


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Paths, the one that was changed longest ago first; without those that are gone meanwhile.

    A save before this one, or a removal of old checkpoints, may still be at work in a folder that is looked through.
    """
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            # The time of a link itself: what it leads to may be gone.
            found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def sync(path: Path) -> None:
    """Flushes a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives an error of the system the file's name, which it has for opening and not for writing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file and flushes it.

    Raises:
        OSError: If that cannot be done; names the file.
    """
    # Flushed here: what is given a name, or is named, next must be on the disk before.
    with naming(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes, token: str | None = None) -> None:
    """Replaces a file's content: a reader sees the old one or the new one, never less.

    Args:
        path: the file.
        content: all of it.
        token: part of the temporary file's name, by which a leftover is known to be a save's; default: a new one.

    Raises:
        OSError: if that cannot be done.
    """
    # In the same folder: a rename is atomic within one file system only. A name of its own: another process may write
    # the same file.
    temporary = beside(path, token or uuid.uuid4().hex[:12], "tmp")
    try:
        write_file(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that led here is the one to be told
            remove(temporary)
        raise
    # The new name lasts from here on; a loss of power before shows the old content.
    sync(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a link or a tree; nothing there is no error."""
    # A link goes, and not what it leads to.
    if path.is_symlink() or not path.is_dir():
        try:
            path.unlink(missing_ok=True)
            return
        except (IsADirectoryError, PermissionError):
            if not path.is_dir():
                raise
            # Another rank has made it meanwhile.
    # Another process may be removing the same tree, and a rest is a leftover, no fault of the save.
    shutil.rmtree(path, ignore_errors=True)


def replace_directory(source: Path, target: Path, aside: Path, *, keep_old: bool = False) -> Path | None:
    """Gives `source` the name `target`, then removes what had that name.

    Where the system can exchange two names, there is no moment without a `target`. Elsewhere the old one
    is at `aside` for that moment, and is put back if the second step fails.

    Once `source` has the name this does not fail any more: where the name cannot be flushed, a warning says so and what
    had it before stays beside it, since a loss of power may bring its name back.

    Args:
        source: a directory whose content is already flushed.
        target: its new name, on the same file system.
        aside: a free name beside the target.
        keep_old: leave the removal, which may take as long as writing did, to the caller.

    Returns:
        What is left to remove.

    Raises:
        OSError: if `source` cannot be given the name.
    """
    # A link that leads nowhere has the name as well.
    if not os.path.lexists(target):
        os.rename(source, target)
        _flush_name(target)
        return None
    old = source
    if not _exchange(source, target):
        old = aside
        os.rename(target, aside)
        try:
            os.rename(source, target)
        except OSError:
            # The old checkpoint is better than none under the name.
            os.rename(aside, target)
            raise
    # Before the old one goes: a loss of power must not bring its name back without its files.
    if not _flush_name(target):
        return None
    if keep_old:
        return old
    remove(old)
    return None


def _flush_name(target: Path) -> bool:
    """Flushes the folder of a directory that has just been given its name; False, with a warning, if it fails."""
    try:
        sync(target.parent)
    except OSError as error:
        # No error: hosts that are told of one would remove what this one already shows.
        warnings.warn(
            f"{target} is there, but its name could not be flushed to the disk and may be lost with the power: {error}",
            stacklevel=3,
        )
        return False
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where that cannot be done."""
    # Older C libraries lack it.
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    if renameat2(*arguments, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    # The kernel, or the file system, does not know the flag; any other error would stop a rename, too.
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


CHUNK_BYTES = 4 << 20
"""Most bytes of a write, and the file offsets at which chunks end are multiples of it."""
# Smaller pieces are put together: one large write costs less than many small ones.
_BORROW_BYTES = 1 << 20
"""From this size on, memory that lies right is written without a copy."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
# With these file systems refuse O_DIRECT, some when a file is opened, some at its first write.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class WriteOptions(TypedDict, total=False):
    """Manner of writing.

    Attributes:
        threads: I/O threads, which are started at once; 0 writes in the caller's thread; default: 2.
        bytes_per_second: bound on the speed; None for none.
        wrote: is told the number of bytes of every chunk on its way to the disk.
    """

    threads: int
    bytes_per_second: float | None
    wrote: Callable[[int], object] | None


class DiskWriter:
    """One rank's writes into the files of a directory.

    Args:
        root: the directory; the files exist at their full size.
        options: see `WriteOptions`.

    Attributes:
        failed_at: (path, byte offset) of the first write that failed.
    """

    def __init__(self, root: Path, **options: Unpack[WriteOptions]) -> None:
        threads = options.get("threads", 2)
        self._root = root
        self._files: dict[str, _File] = {}
        self._pace = Pace(options.get("bytes_per_second"))
        self._wrote = options.get("wrote")
        self._error: BaseException | None = None
        self.failed_at: tuple[str, int] | None = None
        # Bounded: borrowed memory takes no buffer, so this alone holds its caller back to the disk's speed.
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=2 * threads)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        # One that is being filled, and for each thread one in writing and one that waits for it.
        self._chunks = 2 * threads + 1
        self._arena: AlignedArena | None = None
        self._open: _Chunk | None = None
        # Daemons: a thread that waits for work does not keep a process from ending that never came to `close`.
        self._threads = [threading.Thread(target=self._work, name="checkpoint-io", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def write(self, path: str, data: torch.Tensor, offset: int, seen: Seen | None = None) -> None:
        """Writes a flat tensor; it may be changed as soon as this returns, unless it is borrowed.

        CPU memory of at least 1 MiB whose address is congruent to `offset` (see `AlignedArena`) is borrowed: it must
        stay as it is until `finish`.

        Args:
            path: relative to the root.
            data: 1-D, contiguous, on any device.
            offset: byte offset of the first element in the file.
            seen: is given all bytes in their order.

        Raises:
            OSError: if an earlier write failed, or this one.
        """
        flat = as_bytes(data)
        if flat.device.type == "cpu" and flat.numel() >= _BORROW_BYTES and is_aligned(flat, offset):
            self._flush()
            self._borrow(path, flat, offset, seen)
            return
        done = 0
        while done < flat.numel():
            chunk = self._chunk_at(path, offset + done, flat.device.type == "cuda")
            done += chunk.append(flat[done:], seen)
            if chunk.full:
                self._flush()

    def finish(self) -> None:
        """Waits for all writes, flushes the files to disk and closes them.

        Raises:
            OSError: if a write or the flush failed.
        """
        try:
            # The threads end before their errors are looked at, and before the flush, which has to cover all.
            self._flush()
            self._stop()
            self._check()
            for file in self._files.values():
                file.sync()
        finally:
            self.close()

    def close(self) -> None:
        """Stops without waiting for more than the writes under way."""
        # Threads that see an error drop what is still queued.
        self._error = self._error or RuntimeError("closed")
        self._stop()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _borrow(self, path: str, flat: torch.Tensor, offset: int, seen: Seen | None) -> None:
        done = 0
        while done < flat.numel():
            end = min(flat.numel(), _chunk_end(offset + done) - offset)
            part = flat[done:end]
            if seen is not None:
                seen(memory_of(part))
            self._submit(path, part, offset + done, None)
            done = end

    def _chunk_at(self, path: str, offset: int, pinned: bool) -> _Chunk:
        """The open chunk if it goes on at `offset`, else a new one."""
        if self._open is not None and (self._open.path, self._open.end) != (path, offset):
            self._flush()
        if self._open is None:
            memory = self._buffer(pinned)
            # As far into the page as in the file: whole pages of a chunk can then go past the page cache.
            self._open = _Chunk(path, offset, memory[offset % PAGE :][: _chunk_end(offset) - offset], memory)
        return self._open

    def _buffer(self, pinned: bool) -> torch.Tensor:
        if self._arena is None:
            self._arena = AlignedArena(partial(HostMemory, pinned=True) if pinned else None)
            # A page for where a chunk begins within its page, and one for aligning the chunk.
            self._arena.reserve(self._chunks * (CHUNK_BYTES + 2 * PAGE))
            for _ in range(self._chunks):
                self._free.put(self._arena.take(CHUNK_BYTES + PAGE, 0))
        # Jobs that fail give theirs back, too: so an error is raised here, and not waited for.
        memory = self._free.get()
        self._check()
        return memory

    def _flush(self) -> None:
        chunk, self._open = self._open, None
        if chunk is not None:
            self._submit(chunk.path, chunk.content, chunk.begin, chunk.memory)

    def _submit(self, path: str, content: torch.Tensor, offset: int, buffer: torch.Tensor | None) -> None:
        self._check()
        if path not in self._files:
            self._files[path] = _File(self._root / path)
        file = self._files[path]

        def write() -> None:
            try:
                if self._error is None:
                    file.write(content, offset)
                    if self._wrote is not None:
                        self._wrote(content.numel())
            except OSError:
                # The first one: what fails behind it mostly fails for the same reason.
                self.failed_at = self.failed_at or (path, offset)
                raise
            finally:
                if buffer is not None:
                    self._free.put(buffer)

        # In the caller's thread: the threads share one speed.
        self._pace.wait(content.numel())
        if self._threads:
            self._jobs.put(write)
        else:
            write()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            # Whatever it is: the caller waits for buffers that only a living thread gives back.
            except BaseException as error:
                self._error = self._error or error

    def _stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Chunk:
    """Bytes of one file being put together.

    Attributes:
        path, begin: where they go.
        memory: the whole buffer, to be given back.
    """

    def __init__(self, path: str, begin: int, room: torch.Tensor, memory: torch.Tensor) -> None:
        self.path, self.begin, self.memory = path, begin, memory
        self._room, self._filled = room, 0

    @property
    def end(self) -> int:
        return self.begin + self._filled

    @property
    def full(self) -> bool:
        return self._filled == self._room.numel()

    @property
    def content(self) -> torch.Tensor:
        return self._room[: self._filled]

    def append(self, data: torch.Tensor, seen: Seen | None) -> int:
        """Takes as much as there is room for; returns how many bytes."""
        count = min(data.numel(), self._room.numel() - self._filled)
        part = self._room[self._filled : self._filled + count].copy_(data[:count])
        if seen is not None:
            seen(memory_of(part))
        self._filled += count
        return count


class _File:
    """An existing file, open twice: past the page cache where that can be, and through it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        if _O_DIRECT:
            try:
                self._direct = os.open(path, os.O_WRONLY | _O_DIRECT)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    os.close(self._fd)
                    raise

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Writes bytes of CPU memory; whole pages directly if the memory lies right."""
        memory, end = memory_of(data), offset + data.numel()
        # Whole pages of the file: what is beside them in a page may be another rank's.
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        if self._direct is None or first >= last or not is_aligned(data, offset):
            self._write(self._fd, memory, offset)
            return
        self._write(self._fd, memory[: first - offset], offset)
        try:
            self._write(self._direct, memory[first - offset : last - offset], first)
        except OSError as error:
            # Refused at the write, though not when it was opened: through the page cache then.
            if error.errno not in _NOT_DIRECT:
                raise
            self._write(self._fd, memory[first - offset : last - offset], first)
        self._write(self._fd, memory[last - offset :], last)

    def _write(self, fd: int, memory: memoryview, offset: int) -> None:
        direct = fd == self._direct
        while memory:
            try:
                done = os.pwrite(fd, memory, offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            # Without this it would be tried for ever.
            if done == 0:
                raise OSError(errno.EIO, "the file system accepted no bytes", str(self._path))
            memory, offset = memory[done:], offset + done
            if direct and done % PAGE:  # a short write: the rest no longer lies right
                fd, direct = self._fd, False

    def sync(self) -> None:
        with naming(self._path):
            # Past the page cache, too: O_DIRECT leaves the file's metadata and the drive's own cache unflushed.
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)


def create_file(path: Path, head: bytes, size: int) -> None:
    """Makes a new file with its first bytes and reserves its space on the disk, where the file system can.

    Raises:
        OSError: ENOSPC if there is not enough space, or another failure; names the file.
    """
    # A file that is there belongs to another save: never written over.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with naming(path):
            # Before the first byte: a disk that is too small is an error while nothing is lost.
            _reserve(fd, size, path)
            done = 0
            while done < len(head):
                done += os.pwrite(fd, head[done:], done)
    finally:
        os.close(fd)


def _reserve(fd: int, size: int, path: Path) -> None:
    """Not `os.posix_fallocate`: where the file system cannot reserve, that writes zeros everywhere."""
    # Also where nothing can be reserved: ranks write at any offset of a file of the full size.
    os.ftruncate(fd, size)
    fallocate: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or size == 0:
        return
    if fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM):
            raise OSError(code, os.strerror(code), str(path))


def _chunk_end(offset: int) -> int:
    return (offset // CHUNK_BYTES + 1) * CHUNK_BYTES
