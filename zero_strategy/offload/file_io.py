"""Asynchronous transfers between files and memory: submit, poll, wait; with direct I/O where possible.

The alignments come from statx(2) from Linux 6.1 on, for file systems that know them. Elsewhere they are taken to be a
page, and a read shows whether that is enough.

    submit(kind, extents) -> Request --wait--> done, or OSError with path, byte offset, bytes and cause

A request is cut into blocks of `block_bytes`, of which at most `depth` are under way at once, first come first served.
Three queues (`file_queues`) do the same: io_uring and threads in C++, and threads in Python,
the reference. Nothing waits for ever: where no call to the kernel ends for `stall_seconds`, waiting is an error.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from torch import Tensor
from typing_extensions import Self

from zero_strategy.runtime.host_bytes import PAGE, AlignedArena, memory_of

O_DIRECT = getattr(os, "O_DIRECT", 0)
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_FIELDS_AT = 152
"""Of stx_dio_mem_align and stx_dio_offset_align in struct statx."""


@dataclass(frozen=True)
class DirectRules:
    """Multiples of bytes at which memory must begin, and which file offsets and lengths must be."""

    memory: int
    offset: int


def direct_rules(fd: int) -> DirectRules | None:
    """Alignment that a descriptor that was opened with O_DIRECT needs; None if the file system says that it cannot."""
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
    return DirectRules(memory, offset) if memory and offset else None  # 0: no direct I/O on this file


def can_read(fd: int, rules: DirectRules) -> bool:
    """True if a read by these rules works; the file must not be empty.

    Raises:
        OSError: If it fails for another reason.
    """
    nbytes, arena = max(rules.offset, PAGE), AlignedArena()
    arena.reserve(nbytes + rules.memory)
    memory = arena.take(nbytes + rules.memory, 0)
    # The rules may ask for more than a page.
    memory = memory[-memory.data_ptr() % rules.memory :][:nbytes]
    try:
        os.preadv(fd, [memory_of(memory)], 0)
    except OSError as error:
        if error.errno in REFUSALS:
            return False
        raise
    return True


Kind = Literal["read", "write"]
FILE_ENDED = -1
"""Beside the values of errno: a read came to the end of its file."""
BLOCK_GRAIN = 4096
"""Blocks are multiples of this, so that direct I/O stays aligned."""
_MOST_BLOCK_BYTES = 1 << 30
_MOST_DEPTH = 1024
_LOOK_MILLISECONDS = 200
"""Of one wait in a library; between two of them Python handles signals."""


@dataclass(frozen=True)
class OpenFile:
    """A descriptor of a file.

    Attributes:
        fd: Open for what is asked of it.
        path: The file's name in errors.
        alignment: At what multiples of bytes a transfer may begin: 1, or more for one that is open with O_DIRECT.
    """

    fd: int
    path: str
    alignment: int = 1


@dataclass(frozen=True)
class Extent:
    """A range of a file and the memory of its bytes.

    Attributes:
        file: The file.
        memory: uint8, 1-D, contiguous, on the CPU; its length is that of the range.
        offset: Where the range begins, in bytes.
    """

    file: OpenFile
    memory: Tensor
    offset: int


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request that is over.

    Attributes:
        error: 0, an errno, or FILE_ENDED.
        extent: Index of the extent that failed.
        offset, nbytes: What could not be moved, in bytes of the file.
    """

    error: int = 0
    extent: int = 0
    offset: int = 0
    nbytes: int = 0


class Request:
    """Something that is under way; its memory must neither be freed nor changed, nor be read if it is being filled."""

    def __init__(self, queue: FileQueue, number: int, kind: Kind, extents: Sequence[Extent]) -> None:
        self.kind: Kind = kind
        self._queue, self._number, self._extents = queue, number, extents
        self._outcome: Outcome | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """True if it is over, well or not."""
        return self._look(0)

    @property
    def failed(self) -> bool:
        """True if it is over and has failed."""
        return self.done() and self._outcome != Outcome()

    def wait(self) -> None:
        """Returns when all bytes have moved.

        Raises:
            OSError: If they could not be; with the file's path, the byte offset, the bytes and the cause.
            TimeoutError: If no call to the kernel has ended for the queue's `stall_seconds`.
        """
        # The whole queue's calls count: a request may wait long for its turn while others move.
        seen, since = self._queue.calls(), time.monotonic()
        while not self._look(_LOOK_MILLISECONDS):
            calls = self._queue.calls()
            if calls != seen:
                seen, since = calls, time.monotonic()
            elif time.monotonic() - since > self._queue.stall_seconds:
                raise self._stalled()
        outcome = self._outcome
        assert outcome is not None
        if outcome.error:
            self._queue.forget(self._number)  # its error has been told
            raise self._failure(outcome)

    def _look(self, milliseconds: int) -> bool:
        # Who only wants to know does not wait for a thread that waits for the outcome.
        if not self._lock.acquire(blocking=milliseconds > 0):
            return self._outcome is not None
        try:
            if self._outcome is None:
                self._outcome = self._queue.look(self._number, milliseconds)
                # One that failed stays until somebody has been told: `drain` looks for those.
                if self._outcome is not None and not self._outcome.error:
                    self._queue.forget(self._number)
            return self._outcome is not None
        finally:
            self._lock.release()

    def _failure(self, outcome: Outcome) -> OSError:
        file = self._extents[outcome.extent].file
        what = f"{self.kind} of {outcome.nbytes} bytes at byte offset {outcome.offset}"
        if outcome.error == FILE_ENDED:
            return OSError(errno.EIO, f"{what}: the file ends before that", file.path)
        if outcome.error == errno.ECANCELED:
            return OSError(outcome.error, f"{what}: the queue was closed before", file.path)
        return OSError(outcome.error, f"{what}: {os.strerror(outcome.error)}", file.path)

    def _stalled(self) -> TimeoutError:
        first = self._extents[0]
        nbytes = sum(extent.memory.numel() for extent in self._extents)
        return TimeoutError(
            errno.ETIMEDOUT,
            f"{self.kind} of {nbytes} bytes at byte offset {first.offset}: the drive has answered nothing for "
            f"{self._queue.stall_seconds:g} s",
            first.file.path,
        )


class FileQueue(ABC):
    """Common base of all queues. Threads may share one; a process forked from this one must open its own.

    Args:
        depth: Most blocks under way at once.
        block_bytes: Most bytes of a block, a multiple of 4096.
        stall_seconds: How long the drive may be silent before waiting is an error.

    Attributes:
        backend: "io_uring", "threads" or "python".
        reason: Why it is none of the faster ones, or "".

    Raises:
        ValueError: If a number is out of range.
    """

    backend: str

    def __init__(self, depth: int, block_bytes: int, stall_seconds: float) -> None:
        if not 1 <= depth <= _MOST_DEPTH:
            raise ValueError(f"depth must be 1 to {_MOST_DEPTH} blocks, got {depth}")
        if block_bytes % BLOCK_GRAIN or not BLOCK_GRAIN <= block_bytes <= _MOST_BLOCK_BYTES:
            raise ValueError(f"block_bytes must be a multiple of {BLOCK_GRAIN} up to 1 GiB, got {block_bytes}")
        if not 0 < stall_seconds < math.inf:
            raise ValueError(f"stall_seconds must be positive and finite, got {stall_seconds}")
        self.depth, self.block_bytes, self.stall_seconds = depth, block_bytes, stall_seconds
        self.reason = ""
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}  # also keeps the memory of what is under way

    def submit(self, kind: Kind, extents: Sequence[Extent]) -> Request:
        """Begins a transfer of all bytes of some extents, which must not overlap.

        Raises:
            ValueError: If memory is not of the kind asked for, or the queue is closed.
            RuntimeError: In a process forked from the one that opened the queue.
        """
        for extent in extents:
            _check(extent)
        self._check_open()
        with self._lock:
            number = self._begin(kind, extents)
            request = Request(self, number, kind, extents)
            self._requests[number] = request
        # Outside of the lock, which letting go of requests takes.
        self._sweep()
        return request

    def register(self, memory: Tensor) -> bool:
        """Tells that much of the traffic will be with this memory; it is then kept as long as the queue.

        Returns:
            Whether that makes anything faster; either way the memory may be used.
        """
        return False

    def drain(self) -> None:
        """Waits for all that is under way; raises the first error that nobody has been told of."""
        first: OSError | None = None
        for request in list(self._requests.values()):
            try:
                request.wait()
            except OSError as error:
                first = first or error
        if first is not None:
            raise first

    def close(self, *, cancel: bool = False) -> None:
        """Ends the queue with its threads and descriptors. A second call does nothing.

        Args:
            cancel: Do not wait for what has not begun; its requests fail.

        Raises:
            OSError: The first error that nobody has been told of; the queue is closed all the same.
            TimeoutError: If the drive does not answer. What it may still touch is kept until it does.
        """
        if self._closed or os.getpid() != self._process:  # a fork's parent goes on with it
            return
        try:
            if not cancel:
                self.drain()
        finally:
            # Before it ends: `look` must not go into a queue whose handle is gone.
            self._closed = True
            if not self._stop():
                self._linger()

    def forget(self, number: int) -> None:
        """Lets a request that is over go."""
        with self._lock:
            if self._requests.pop(number, None) is not None and not self._closed:
                self._forget(number)

    def look(self, number: int, milliseconds: int) -> Outcome | None:
        """Result of a request; None if it is not over within this time."""
        if os.getpid() != self._process:
            self._check_open()
        if self._closed:  # whatever was left has been cancelled
            return Outcome(errno.ECANCELED)
        return self._look(number, milliseconds)

    @abstractmethod
    def calls(self) -> int:
        """Calls to the kernel that have ended: it grows as long as anything moves."""

    @abstractmethod
    def _begin(self, kind: Kind, extents: Sequence[Extent]) -> int: ...

    @abstractmethod
    def _look(self, number: int, milliseconds: int) -> Outcome | None: ...

    @abstractmethod
    def _forget(self, number: int) -> None: ...

    @abstractmethod
    def _stop(self) -> bool:
        """Cancels what has not begun and ends; False if that takes longer than `stall_seconds`."""

    def _linger(self) -> None:
        """Keeps memory and descriptors while a drive that does not answer may still use them."""

        def until_it_answers() -> None:
            while not self._stop():
                pass

        threading.Thread(target=until_it_answers, name="file-queue-linger", daemon=True).start()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"a file queue of process {self._process} was used in process {os.getpid()}, forked from it, "
                "which has none of its threads: open another one there"
            )
        if self._closed:
            raise ValueError("the file queue is closed")

    def _sweep(self) -> None:
        """Lets go of the oldest requests that are over, so that ones that nobody waits for do not pile up."""
        for request in list(self._requests.values()):
            # The first that goes on ends it, so that a submission does not ask after all that is under way.
            if not request.done():
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)


def _check(extent: Extent) -> None:
    memory = extent.memory
    if memory.device.type != "cpu" or memory.dim() != 1 or memory.element_size() != 1 or not memory.is_contiguous():
        raise ValueError(
            f"file I/O needs flat contiguous bytes in host memory, got {tuple(memory.shape)} of {memory.dtype} on "
            f"{memory.device}: pass tensor.view(torch.uint8)"
        )
    if extent.offset < 0:
        raise ValueError(f"{extent.file.path}: byte offset {extent.offset} is negative")
