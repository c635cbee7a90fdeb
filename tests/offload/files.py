"""Common helpers of the tests of file I/O: memory at chosen addresses, random bytes, and what a process holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero_strategy.offload.file_io import OpenFile
from zero_strategy.offload.file_queues import BACKENDS, Backend, load_library
from zero_strategy.ops.build import BuildError, recipe
from zero_strategy.runtime.host_bytes import AlignedArena

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def need(backend: Backend) -> None:
    """Skips where there is no compiler; fails where there is one and it fails."""
    if backend != "python":
        try:
            load_library()
        except BuildError as error:
            (pytest.skip if recipe("io").compiler is None else pytest.fail)(str(error))


def random_bytes(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned(nbytes: int) -> Tensor:
    """Zeros at the beginning of a page."""
    arena = AlignedArena()
    arena.reserve(max(nbytes, 1))
    return arena.take(nbytes, 0).zero_()


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT, alignment: int = 1) -> Iterator[OpenFile]:
    fd = os.open(path, flags, 0o600)
    try:
        yield OpenFile(fd, str(path), alignment)
    finally:
        os.close(fd)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if descriptors or threads, of Python or not, are more at the end than at the beginning."""
    before = _held()

    def more() -> bool:
        return any(now > then for now, then in zip(_held(), before, strict=True))  # an earlier test's may end meanwhile

    yield
    end = time.monotonic() + 20  # the kernel's own workers of a ring take a moment to go
    while more() and time.monotonic() < end:
        time.sleep(0.01)
    assert not more(), (before, _held())


def _held() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()
