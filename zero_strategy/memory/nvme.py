"""temporary"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class _Pending:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class NvmeTier:
    """temporary"""

    name = "nvme"

    def __init__(self, directory: str) -> None:
        self._file, self._path = tempfile.mkstemp(dir=directory)
        os.unlink(self._path)
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0
        self._pool = ThreadPoolExecutor(2)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        for name, nbytes in sizes.items():
            self._places[name] = (self._end, nbytes)
            self._end += -(-nbytes // 4096) * 4096

    def resident(self, record: str) -> Tensor | None:
        return None

    def read(self, record: str, memory: Tensor) -> _Pending:
        offset, nbytes = self._places[record]
        assert nbytes == memory.numel()
        return _Pending(self._pool.submit(os.preadv, self._file, [memory.numpy()], offset))  # type: ignore[list-item]

    def write(self, record: str, memory: Tensor) -> _Pending:
        offset, nbytes = self._places[record]
        assert nbytes == memory.numel()
        return _Pending(self._pool.submit(os.pwritev, self._file, [memory.numpy()], offset))  # type: ignore[list-item]

    def release(self, records: Iterable[str]) -> None:
        for record in records:
            del self._places[record]

    def close(self) -> None:
        self._pool.shutdown()
