"""The file queues: io_uring or threads in C++, threads in Python as the reference, and their choice.

Calls to the kernel leave the interpreter's lock, so blocks move in parallel. The rules by which a block goes on after a
short or failed call are those of `cpp/io/queue.h`.

`ZERO_STRATEGY_IO=io_uring`, `threads` or `python` asks for one; it is then an error if it cannot be had.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from zero_strategy.offload.file_io import FILE_ENDED, Extent, FileQueue, Kind, Outcome
from zero_strategy.ops.build import BuildError, obtain
from zero_strategy.ops.library import NATIVE_VARIABLE
from zero_strategy.runtime.host_bytes import memory_of


class _Extent(ctypes.Structure):
    """See cpp/io/queue.h."""

    _fields_ = [
        ("fd", ctypes.c_int32),
        ("alignment", ctypes.c_uint32),
        ("memory", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    ]


class _Outcome(ctypes.Structure):
    """See cpp/io/queue.h."""

    _fields_ = [
        ("error", ctypes.c_int32),
        ("extent", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    ]


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library, built if need be.

    Raises:
        BuildError: If there is no compiler, it fails, or ZERO_STRATEGY_NATIVE says to do without.
        OSError: If it cannot be loaded.
    """
    mode = os.environ.get(NATIVE_VARIABLE, "1").lower()
    if mode in ("0", "false", "no", "off"):
        raise BuildError(f"{NATIVE_VARIABLE}={mode}")
    library = ctypes.CDLL(str(obtain("io", mode)))
    handle, number, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "open": (handle, [ctypes.c_int, ctypes.c_uint, size, ctypes.POINTER(ctypes.c_int)]),
        "submit": (number, [handle, ctypes.c_int, ctypes.POINTER(_Extent), size]),
        "wait": (ctypes.c_int, [handle, number, ctypes.c_int, ctypes.POINTER(_Outcome)]),
        "forget": (None, [handle, number]),
        "calls": (size, [handle]),
        "shorten": (None, [handle, size]),
        "register": (ctypes.c_int, [handle, handle, size]),
        "close": (ctypes.c_int, [handle, ctypes.c_int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"zs_io_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class NativeQueue(FileQueue):
    """See `FileQueue`.

    Args:
        backend: "io_uring" or "threads".

    Raises:
        BuildError: If there is no library.
        OSError: If the kernel refuses: ENOSYS and EPERM are what an old kernel and a seccomp filter say to io_uring.
    """

    def __init__(
        self, backend: Literal["io_uring", "threads"], depth: int, block_bytes: int, stall_seconds: float = 60.0
    ) -> None:
        super().__init__(depth, block_bytes, stall_seconds)
        self.backend = backend
        self._library = load_library()
        error = ctypes.c_int(0)
        self._handle = self._library.zs_io_open(backend == "io_uring", depth, block_bytes, ctypes.byref(error))
        if not self._handle:
            raise OSError(error.value, f"{backend} is refused: {os.strerror(error.value)}")
        self._registered: list[Tensor] = []
        self._finalizer = weakref.finalize(
            self, _close, self._library, self._handle, _milliseconds(stall_seconds), os.getpid()
        )

    def register(self, memory: Tensor) -> bool:
        self._check_open()
        with self._lock:
            if self._library.zs_io_register(self._handle, memory.data_ptr(), memory.numel()) != 0:
                return False
            self._registered.append(memory)
            return True

    def shorten(self, nbytes: int) -> None:
        """For tests: every call asks for so many bytes at most, and so comes back short; 0 for no bound."""
        self._library.zs_io_shorten(self._handle, nbytes)

    def calls(self) -> int:
        return 0 if self._closed else int(self._library.zs_io_calls(self._handle))

    def _begin(self, kind: Kind, extents: Sequence[Extent]) -> int:
        table = (_Extent * len(extents))(
            *(_Extent(e.file.fd, e.file.alignment, e.memory.data_ptr(), e.offset, e.memory.numel()) for e in extents)
        )
        number = int(self._library.zs_io_submit(self._handle, kind == "write", table, len(extents)))
        if number < 0:
            raise OSError(-number, f"the {self.backend} queue has ended: {os.strerror(-number)}")
        return number

    def _look(self, number: int, milliseconds: int) -> Outcome | None:
        found = _Outcome()
        over = self._library.zs_io_wait(self._handle, number, milliseconds, ctypes.byref(found))
        assert over != -errno.ENOENT, "a request is forgotten after it has been looked at"
        return Outcome(found.error, found.extent, found.offset, found.nbytes) if over else None

    def _forget(self, number: int) -> None:
        self._library.zs_io_forget(self._handle, number)

    def _stop(self) -> bool:
        # From here on it is closed by hand: a handle is closed once, and `_linger` may have to try again.
        self._finalizer.detach()
        return _close(self._library, self._handle, _milliseconds(self.stall_seconds), self._process)


def _close(library: ctypes.CDLL, handle: int, milliseconds: int, process: int) -> bool:
    """False if the drive does not answer in time. A process forked from the queue's has none of its threads."""
    return os.getpid() != process or library.zs_io_close(handle, milliseconds) == 0


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1e3) + 1, 1 << 30)


_MOST_RETRIES = 100  # as in cpp/io/queue.h, so that all queues give up alike
_MOST_STALLS = 1


@dataclass(eq=False)
class _Job:
    kind: Kind
    blocks: deque[_Block]
    under_way: int = 0
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def handed_out(self) -> bool:
        return not self.blocks or bool(self.outcome.error)

    @property
    def over(self) -> bool:
        return self.handed_out and not self.under_way


@dataclass(eq=False)
class _Block:
    """A part of an extent, and how much of it has moved."""

    index: int
    fd: int
    alignment: int
    memory: memoryview
    offset: int
    done: int = 0
    retries: int = 0
    stalls: int = 0
    error: int = 0

    def again(self, kind: Kind, result: int) -> bool:
        """Takes the result of a call, bytes or -errno, to account; returns whether another one is needed."""
        if result < 0:
            if -result in (errno.EINTR, errno.EAGAIN) and self.retries < _MOST_RETRIES:
                self.retries += 1
                return True
            self.error = -result
            return False
        moved = self.done + result
        if moved >= len(self.memory):
            self.done = len(self.memory)
            return False
        # Direct I/O goes on at aligned bytes only: what came behind the last one is moved again.
        kept = moved - moved % self.alignment
        if kept > self.done:
            self.done, self.stalls = kept, 0
            return True
        if self.stalls < _MOST_STALLS:
            self.stalls += 1
            return True
        self.error = errno.EIO if kind == "write" else FILE_ENDED
        return False


class ThreadQueue(FileQueue):
    """See `FileQueue`. As many threads as blocks may be under way."""

    backend = "python"

    def __init__(self, depth: int, block_bytes: int, stall_seconds: float = 60.0) -> None:
        super().__init__(depth, block_bytes, stall_seconds)
        self._work = _Work(depth)
        # The threads know the work, not the queue: a queue that nobody holds ends them.
        self._finalizer = weakref.finalize(self, self._work.stop, stall_seconds, os.getpid())

    def calls(self) -> int:
        return self._work.calls

    def _begin(self, kind: Kind, extents: Sequence[Extent]) -> int:
        return self._work.add(_Job(kind, deque(_cut(extents, self.block_bytes))))

    def _look(self, number: int, milliseconds: int) -> Outcome | None:
        return self._work.look(number, milliseconds / 1e3)

    def _forget(self, number: int) -> None:
        self._work.forget(number)

    def _stop(self) -> bool:
        self._finalizer.detach()
        return self._work.stop(self.stall_seconds, self._process)


class _Work:
    """State that the threads share."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[int, _Job] = {}
        self._last = 0
        self._closing = False
        self.calls = 0
        # Daemons: a call that a drive never answers must not keep the process from its end.
        self._threads = [threading.Thread(target=self._run, name="file-queue", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def add(self, job: _Job) -> int:
        with self._changed:
            self._last += 1
            self._jobs[self._last] = job
            if not job.over:  # one of no bytes is over at once
                self._waiting.append(job)
                self._changed.notify_all()
            return self._last

    def look(self, number: int, seconds: float) -> Outcome | None:
        with self._changed:
            job = self._jobs[number]
            return job.outcome if self._changed.wait_for(lambda: job.over, seconds) else None

    def forget(self, number: int) -> None:
        with self._changed:
            self._jobs.pop(number, None)

    def stop(self, seconds: float, process: int) -> bool:
        if os.getpid() != process:  # a forked child has none of the threads
            return True
        with self._changed:
            self._closing = True
            for job in self._waiting:
                if not job.outcome.error:
                    block = job.blocks[0]
                    job.outcome = Outcome(errno.ECANCELED, block.index, block.offset, len(block.memory))
            # Also jobs of which some blocks are under way: these end, and the rest of them is cancelled.
            self._waiting.clear()
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not any(job.under_way for job in self._jobs.values()), seconds)
        if idle:
            for thread in self._threads:
                thread.join()  # one in a call that does not return could not be joined
        return idle

    def _take(self) -> tuple[_Job, _Block] | None:
        while self._waiting:
            job = self._waiting[0]
            if job.handed_out:
                self._waiting.popleft()
                continue
            block = job.blocks.popleft()
            job.under_way += 1
            if not job.blocks:
                self._waiting.popleft()
            return job, block
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while (taken := self._take()) is None:
                    if self._closing:
                        return
                    self._changed.wait()
            job, block = taken
            while block.again(job.kind, _call(job.kind, block)):
                self.calls += 1  # without the lock: it only tells that something moves
            with self._changed:
                self.calls += 1
                job.under_way -= 1
                if block.error and not job.outcome.error:
                    left = len(block.memory) - block.done
                    job.outcome = Outcome(block.error, block.index, block.offset + block.done, left)
                self._changed.notify_all()


def _cut(extents: Sequence[Extent], block_bytes: int) -> Iterator[_Block]:
    for index, extent in enumerate(extents):
        memory = memory_of(extent.memory)
        for begin in range(0, len(memory), block_bytes):
            part = memory[begin : begin + block_bytes]
            yield _Block(index, extent.file.fd, extent.file.alignment, part, extent.offset + begin)


def _call(kind: Kind, block: _Block) -> int:
    """One system call; bytes or -errno."""
    rest, at = block.memory[block.done :], block.offset + block.done
    try:
        return os.preadv(block.fd, [rest], at) if kind == "read" else os.pwritev(block.fd, [rest], at)
    except OSError as error:
        return -(error.errno or errno.EIO)


IO_VARIABLE = "ZERO_STRATEGY_IO"
Backend = Literal["io_uring", "threads", "python"]
BACKENDS: tuple[Backend, ...] = ("io_uring", "threads", "python")
DEFAULT_DEPTH = 16
DEFAULT_BLOCK_BYTES = 1 << 20


def open_queue(
    backend: Backend | None = None,
    *,
    depth: int = DEFAULT_DEPTH,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    stall_seconds: float = 60.0,
) -> FileQueue:
    """A queue, to be closed by the caller.

    Args:
        backend: One of BACKENDS; None for what `ZERO_STRATEGY_IO` says, or else the first that can be had.
        depth, block_bytes, stall_seconds: See `FileQueue`; `probe` measures the first two.

    Raises:
        ValueError: If a value is out of range, or there is no such backend.
        OSError, BuildError: If the backend that was asked for cannot be had.
    """
    wanted = backend or os.environ.get(IO_VARIABLE) or None
    if wanted is not None and wanted not in BACKENDS:
        source = "backend" if backend else IO_VARIABLE
        raise ValueError(f"{source}={wanted!r} is no kind of file I/O; there are {', '.join(BACKENDS)}")
    if wanted == "python":
        return ThreadQueue(depth, block_bytes, stall_seconds)
    if wanted is not None:
        return NativeQueue(wanted, depth, block_bytes, stall_seconds)
    return _first_of_all(depth, block_bytes, stall_seconds)


def _first_of_all(depth: int, block_bytes: int, stall_seconds: float) -> FileQueue:
    try:
        load_library()
    except (BuildError, OSError) as error:
        queue: FileQueue = ThreadQueue(depth, block_bytes, stall_seconds)
        queue.reason = (str(error).splitlines() or [type(error).__name__])[0]
        _say_once(f"no native file I/O ({queue.reason}); threads of Python run instead")
        return queue
    try:
        # An old kernel refuses it, and so may the filter of a container.
        return NativeQueue("io_uring", depth, block_bytes, stall_seconds)
    except OSError as error:
        queue = NativeQueue("threads", depth, block_bytes, stall_seconds)
        queue.reason = str(error.strerror)
        return queue


@lru_cache(maxsize=8)
def _say_once(text: str) -> None:
    print(f"zero_strategy: {text}", file=sys.stderr, flush=True)
