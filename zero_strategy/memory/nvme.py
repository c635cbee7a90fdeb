"""The tier in files on NVMe drives: a `StateFile` for every set of records that is reserved together."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zero_strategy.memory.backends import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH, open_queue
from zero_strategy.memory.file_queue import FileQueue, Kind
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.state_file import StateFile, Transfer, outcome_of
from zero_strategy.runtime.observing import Observed


class NvmeTier:
    """Records in files of this rank, which nobody else sees and which are gone with the process.

    Threads may share it: a gather reads in a thread of its own, a save in the background in another. The lock is
    held while records are looked up and transfers begin or are ticked off, never while bytes move.

    Args:
        directories: On one or several drives, over which records are striped.
        rank: Of this process, for the files' names.
        label: Whose state it is, for the same.
        block_bytes: Most bytes of one read or write of a drive; see `probe`.
        depth: How many are under way at once, per directory.
        checksums: Keep a checksum of every record in memory, and compare it on reading.
        observed: Who is told of transfers; None: nobody.

    Attributes:
        observed: See the argument.
    """

    name = "nvme"

    def __init__(
        self,
        directories: Sequence[str],
        rank: int = 0,
        label: str = "state",
        *,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        depth: int = DEFAULT_DEPTH,
        checksums: bool = False,
        observed: Observed | None = None,
    ) -> None:
        self._directories, self._rank, self._label, self._checksums = list(directories), rank, label, checksums
        self._queue: FileQueue = open_queue(depth=depth * len(self._directories), block_bytes=block_bytes)
        self._files: dict[str, StateFile] = {}
        self._staging: list[HostMemory] = []
        self._lock = threading.RLock()
        self.observed = observed or Observed()
        self._finalizer = weakref.finalize(self, _close, self._queue, self._files, os.getpid())

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make a file for these records.

        Raises:
            OSError: If there is no room, with the bytes needed and the bytes free.
        """
        with self._lock:
            file = StateFile(
                self._directories,
                sizes,
                queue=self._queue,
                label=self._label,
                rank=self._rank,
                checksums=self._checksums,
            )
            self._files.update(dict.fromkeys(sizes, file))

    def resident(self, record: str) -> None:
        """Nothing: records are in files."""

    def read(self, record: str, memory: Tensor) -> NvmeTransfer:
        """Begin to read a record."""
        return self._begin("read", record, memory)

    def write(self, record: str, memory: Tensor) -> NvmeTransfer:
        """Begin to write a record."""
        return self._begin("write", record, memory)

    def _begin(self, kind: Kind, record: str, memory: Tensor) -> NvmeTransfer:
        while True:
            with self._lock:
                file = self._files[record]
                before = file.meeting(kind, record, 0, memory.numel())
                if not before:
                    begin = file.read if kind == "read" else file.write
                    ended = self.observed.transfer("disk_read" if kind == "read" else "disk_write", memory.numel())
                    return NvmeTransfer(begin(record, memory), self._lock, self.observed, ended)
            for transfer in before:  # its error is its owner's to tell
                outcome_of(transfer, self._lock)

    def staging(self, nbytes: int) -> Tensor:
        """Memory that the queue knows, if that makes anything faster; it is kept as long as the tier."""
        memory = HostMemory(nbytes, pinned=torch.cuda.is_available())
        with self._lock:
            self._staging.append(memory)
            self._queue.register(memory.bytes)
        return memory.bytes[:nbytes]

    def mark_torn(self, records: Iterable[str], reason: str) -> None:
        """Refuse to read records until they are written anew."""
        with self._lock:
            for record in records:
                self._files[record].mark_torn([record], reason)

    def is_torn(self, record: str) -> bool:
        """Whether a record is refused."""
        with self._lock:
            return record in self._files[record].torn

    def release(self, records: Iterable[str]) -> None:
        """Give records up; a file goes with the last of its own."""
        with self._lock:
            touched = {id(file): file for file in (self._files.pop(record) for record in records)}
            kept = {id(file) for file in self._files.values()}
            for identity, file in touched.items():
                if identity not in kept:
                    file.close()

    def close(self) -> None:
        """Wait for what is under way and give all room back."""
        with self._lock:
            self._finalizer()


class NvmeTransfer:
    """A read or a write under way; `ended` is called when it is known to be over."""

    def __init__(
        self, transfer: Transfer, lock: threading.RLock, observed: Observed, ended: Callable[[], None] | None
    ) -> None:
        self._transfer, self._lock, self._observed, self._ended = transfer, lock, observed, ended

    def wait(self) -> None:
        """Return when all bytes have moved; see `Transfer.wait`."""
        with self._observed.span("disk"):
            self._transfer.wait(self._lock)
        if self._ended is not None:
            self._ended()
            self._ended = None


def _close(queue: FileQueue, files: dict[str, StateFile], process: int) -> None:
    if os.getpid() != process:  # a forked child has no part in what is under way
        return
    try:
        for file in {id(file): file for file in files.values()}.values():
            file.close()
    finally:
        files.clear()
        queue.close()
