"""The file queues in C++ (`cpp/io/`), called through ctypes, which leaves the interpreter's lock during calls."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from zero_strategy.memory.file_queue import Extent, FileQueue, Kind, Outcome
from zero_strategy.ops import cache
from zero_strategy.ops.build import BuildError, build, recipe
from zero_strategy.ops.native import NATIVE_VARIABLE


class _Extent(ctypes.Structure):
    """As in cpp/io/queue.h."""

    _fields_ = [
        ("fd", ctypes.c_int32),
        ("alignment", ctypes.c_uint32),
        ("memory", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
    ]


class _Outcome(ctypes.Structure):
    """As in cpp/io/queue.h."""

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
    made = recipe("io")
    path = cache.find(made.source_key, made.compiler_key)
    if path is None:
        if mode == "cached":
            raise BuildError(f"not built, and {NATIVE_VARIABLE}=cached")
        path = build(made)
    library = ctypes.CDLL(str(path))
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
        self._finalizer.detach()
        return _close(self._library, self._handle, _milliseconds(self.stall_seconds), self._process)


def _close(library: ctypes.CDLL, handle: int, milliseconds: int, process: int) -> bool:
    """False if the drive does not answer in time. A process forked from the queue's has none of its threads."""
    return os.getpid() != process or library.zs_io_close(handle, milliseconds) == 0


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1e3) + 1, 1 << 30)
