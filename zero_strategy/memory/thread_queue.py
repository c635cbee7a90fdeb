"""The file queue in plain Python: threads that read and write. The reference, and what runs without a compiler.

Calls to the kernel leave the interpreter's lock, so blocks move in parallel. The rules by which a block goes on after a
short or failed call are those of `cpp/io/queue.h`.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zero_strategy.memory.file_queue import FILE_ENDED, Extent, FileQueue, Kind, Outcome
from zero_strategy.runtime.transfer import memory_of

_MOST_RETRIES = 100
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
    """What the threads share."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[int, _Job] = {}
        self._last = 0
        self._closing = False
        self.calls = 0
        self._threads = [threading.Thread(target=self._run, name="file-queue", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def add(self, job: _Job) -> int:
        with self._changed:
            self._last += 1
            self._jobs[self._last] = job
            if not job.over:
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
            self._waiting.clear()
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: not any(job.under_way for job in self._jobs.values()), seconds)
        if idle:
            for thread in self._threads:
                thread.join()
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
                self.calls += 1
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
