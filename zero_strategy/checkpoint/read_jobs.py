"""Reads of many ranges: threads take them in the order of the files, and the kernel is told what comes next.

Without that, a disk would wait for each range's checksum and copy before it hears of the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_strategy.runtime.transfer import Transfer

_THREADS = 2
_AHEAD_BYTES = 64 << 20
"""Announced to the kernel before it is read; it ends up in the page cache for a moment."""
_ANNOUNCED_AT_ONCE = 8 << 20


@dataclass(frozen=True, eq=False)
class ReadJob:
    """A range of an open file.

    Attributes:
        fd, offset, nbytes: The range.
        fill: Reads it, given the descriptor and a `Transfer` of the thread's own.
    """

    fd: int
    offset: int
    nbytes: int
    fill: Callable[[int, Transfer], object]


def run_jobs(jobs: Sequence[ReadJob], chunk_bytes: int) -> None:
    """Carries jobs out; raises the first error."""
    queue = _Queue(sorted(jobs, key=lambda job: (job.fd, job.offset)))

    def work() -> None:
        transfer = Transfer(chunk_bytes)
        while (job := queue.next()) is not None:
            try:
                job.fill(job.fd, transfer)
            except BaseException as error:
                queue.fail(error)

    threads = [threading.Thread(target=work, name="checkpoint-read", daemon=True) for _ in range(_THREADS - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if queue.error is not None:
        raise queue.error


class _Queue:
    """Jobs in order, some bytes of them announced ahead."""

    def __init__(self, jobs: list[ReadJob]) -> None:
        self._jobs, self._lock = jobs, threading.Lock()
        self._taken = self._announced = 0
        self._ahead = 0
        self.error: BaseException | None = None

    def next(self) -> ReadJob | None:
        with self._lock:
            if self.error is not None or self._taken == len(self._jobs):
                return None
            job = self._jobs[self._taken]
            self._taken += 1
            self._announce()
            self._ahead -= job.nbytes
            return job

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def _announce(self) -> None:
        while self._announced < len(self._jobs) and (self._ahead < _AHEAD_BYTES or self._announced < self._taken):
            job = self._jobs[self._announced]
            self._announced += 1
            self._ahead += job.nbytes
            if hasattr(os, "posix_fadvise"):
                for begin in range(0, min(job.nbytes, _AHEAD_BYTES), _ANNOUNCED_AT_ONCE):
                    size = min(_ANNOUNCED_AT_ONCE, job.nbytes - begin)
                    os.posix_fadvise(job.fd, job.offset + begin, size, os.POSIX_FADV_WILLNEED)
