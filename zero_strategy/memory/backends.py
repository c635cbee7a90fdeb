"""Which file queue runs here: io_uring, else threads in C++, else threads in Python.

`ZERO_STRATEGY_IO=io_uring`, `threads` or `python` asks for one; it is then an error if it cannot be had.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Literal

from zero_strategy.memory.file_queue import FileQueue
from zero_strategy.memory.native_queue import NativeQueue, load_library
from zero_strategy.memory.thread_queue import ThreadQueue
from zero_strategy.ops.build import BuildError

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
        return NativeQueue("io_uring", depth, block_bytes, stall_seconds)
    except OSError as error:
        queue = NativeQueue("threads", depth, block_bytes, stall_seconds)
        queue.reason = str(error.strerror)
        return queue


@lru_cache(maxsize=8)
def _say_once(text: str) -> None:
    print(f"zero_strategy: {text}", file=sys.stderr, flush=True)
