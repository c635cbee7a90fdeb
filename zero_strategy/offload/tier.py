r"""Tiers of state below the device's memory: the interface, host memory, NVMe files, and device copies.

    computing   ... | gradients |      ...        | forward reads weights
                         \                        ^
    down                  copy -> host waits       |
    up                             copy, from host-+ (computing waits for it, the host does not)

A copy begins when what is queued on the computing stream at that moment is done. On the CPU copies are made at once.
The allocator hands memory out again in the order of the stream that took it, so before the last reference to it goes,
that stream waits for what others do with it (`HeldForCopies`). `record_stream` would do, too, but gives memory back
only when the host sees that the device is past that point. A host that runs ahead sees that late, and takes new memory.

Large pages where the kernel has them: I/O past the page cache looks up and holds every page. Forked children do not get
it: a transfer under way and a copy-on-write of its pages would put bytes where nobody looks. Pinned by registering the
mapping with CUDA; torch's own pinned allocator rounds up to powers of two and keeps what is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_strategy.offload.file_io import FileQueue, Kind
from zero_strategy.offload.file_queues import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH, open_queue
from zero_strategy.offload.state_file import StateFile, Transfer, outcome_of
from zero_strategy.runtime.compute_device import where_memory_is_held, with_index
from zero_strategy.runtime.host_bytes import PAGE
from zero_strategy.runtime.observer import Observed


class Streams(Protocol):
    """Needs of copies from a device's queues. Streams and events have the methods of CUDA's in torch."""

    def new(self) -> Any:
        """A stream."""

    def current(self) -> Any:
        """The stream on which this thread computes."""

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on a stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Let a tensor's memory not be used again before what is queued on the stream now is done."""


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device)

    def new(self) -> Any:
        """A stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """The stream on which this thread computes."""
        return torch.cuda.current_stream(self._device)

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on a stream."""
        inside: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return inside

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Let a tensor's memory not be used again before what is queued on the stream now is done."""
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """The queues of a device; None where everything is done at once, as on the CPU."""
    return CudaStreams(device) if device.type == "cuda" else None


class Landing:
    """The end of a copy, to be waited for by whoever uses what has been copied, or changes what it was copied from.

    Args:
        streams: The device's queues; None: it has ended.
        stream: On which it was queued.

    Attributes:
        event: The end, where there is a device.
    """

    def __init__(self, streams: Streams | None = None, stream: Any = None) -> None:
        self._streams, self._stream = streams, stream
        self.event: Any = None if stream is None else stream.record_event()

    def on_host(self) -> None:
        """Return when it has ended."""
        if self.event is not None:
            self.event.synchronize()

    def is_over(self) -> bool:
        """True if it has ended; the host does not wait."""
        return self.event is None or bool(self.event.query())

    def on_device(self) -> None:
        """Let what this thread queues on the device from now on wait for it."""
        if self._streams is not None:
            self._streams.current().wait_event(self.event)

    def after(self) -> AbstractContextManager[object]:
        """Inside, what this thread queues on the device comes after it, without the stream that computes."""
        return contextlib.nullcontext() if self._streams is None else self._streams.within(self._stream)

    wait, is_completed = on_device, is_over


class HeldCopy:
    """A copy under way, and the memory of the device that it uses.

    Attributes:
        tensor: The memory; None once what computes waits for the copy, so that others may let go of it.
        event: The copy's end.
        home: The stream that took the memory, and in whose order it is given back.
    """

    def __init__(self, tensor: Tensor, event: Any, home: Any) -> None:
        self.tensor: Tensor | None = tensor
        self.event, self.home = event, home


class HeldForCopies:
    """Memory of copies under way, in groups; a group goes when the stream that took it waits for its copies.

    So memory is used again in the order of that stream, and the number of groups bounds what is held at any moment of
    the device's time, however far the host is ahead.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._groups: deque[list[HeldCopy]] = deque()

    def begin_group(self, most: int) -> None:
        """Let the oldest groups go, so that there are `most` with the one that begins."""
        while len(self._groups) >= most:
            self._end_oldest()
        self._groups.append([])

    def hold(self, tensor: Tensor, event: Any) -> HeldCopy:
        """Hold memory of the current stream for a copy that ends with this event."""
        if not self._groups:
            self._groups.append([])
        copy = HeldCopy(tensor, event, self._streams.current())
        self._groups[-1].append(copy)
        return copy

    def use(self, copy: HeldCopy, memory: Tensor) -> None:
        """Let what is queued from now on, which uses this memory, wait for one copy."""
        self._end(copy)
        current = self._streams.current()
        if current != copy.home:  # a graph of several streams: rare, and then the allocator has to know
            current.wait_event(copy.event)
            self._streams.keep(memory, current)

    def end_through(self, copy: HeldCopy) -> None:
        """Let all groups go up to the one of a copy."""
        while copy.tensor is not None:
            self._end_oldest()

    def end_all(self) -> None:
        """Let all groups go."""
        while self._groups:
            self._end_oldest()

    def _end_oldest(self) -> None:
        for copy in self._groups.popleft():
            self._end(copy)

    @staticmethod
    def _end(copy: HeldCopy) -> None:
        if copy.tensor is not None:
            copy.home.wait_event(copy.event)
            copy.tensor = None


class DeviceCopies:
    """Copies from and to one device.

    Args:
        device: The device.
        streams: Its queues; default: a CUDA device's own, on the CPU none.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._streams = streams_of(device) if streams is None else streams
        self._down: Any = None
        self._up: Any = None
        self._sums: HeldForCopies | None = None

    @property
    def at_once(self) -> bool:
        """True if a copy is over when it has been asked for."""
        return self._streams is None

    def down(self, source: Tensor, target: Tensor) -> Landing:
        """Begin to copy from the device to memory of the host, which holds the values when that has landed there."""
        if self._streams is None:
            target.copy_(source)
            return Landing()
        return self._copy(self._streams, self._down_stream(self._streams), source, target, source)

    def up(self, source: Tensor, target: Tensor, *, keep: bool = True) -> Landing:
        """Begin to copy from memory of the host, which stays as it is until that has landed, to the device.

        Args:
            source: Memory of the host.
            target: Memory of the device.
            keep: Let the target be let go of at any time; else not before what computes waits for the landing.
        """
        if self._streams is None:
            target.copy_(source)
            return Landing()
        return self._copy(self._streams, self._up_stream(self._streams), source, target, target if keep else None)

    def begin_sums(self) -> None:
        """Before `add_down` of a vector: let what computes wait for those of the one before, whose memory goes."""
        if self._streams is not None:
            self._sums = self._sums or HeldForCopies(self._streams)
            self._sums.begin_group(1)

    def add_down(
        self,
        values: Tensor,
        target: Tensor,
        *,
        first: bool,
        earlier: Landing,
        look: Callable[[Tensor], object] | None = None,
    ) -> Landing:
        """Begin to add to memory of the host, or to replace what is there; computed on the device, beside the rest.

        The old sums come up, and the new ones go down, in the device's own order: the host neither waits nor adds.

        Args:
            values: Memory of the device that nobody else changes; where it replaces, in the target's dtype.
            target: Memory of the host.
            first: Replace.
            earlier: The end of what has written to the target before.
            look: Takes the sums on the device, on the stream that brings them down.
        """
        streams = self._streams
        assert streams is not None and self._sums is not None
        down, total = self._down_stream(streams), values
        if not first:
            up, total = self._up_stream(streams), torch.empty_like(values, dtype=target.dtype)
            up.wait_stream(streams.current())  # which may have used the memory of the total before
            with streams.within(up):
                # The old sums may still be on their way down, on the other stream.
                earlier.on_device()
                total.copy_(target, non_blocking=True)
            down.wait_stream(up)
        down.wait_stream(streams.current())  # which computes the values
        with streams.within(down):
            if not first:
                total.add_(values)
            if look is not None:
                look(total)
            target.copy_(total, non_blocking=True)
        landing = Landing(streams, down)
        for memory in (values,) if first else (values, total):
            self._sums.hold(memory, landing.event)
        return landing

    def end_sums(self) -> None:
        """The host has waited for all sums: their memory on the device goes."""
        if self._sums is not None:
            self._sums.end_all()

    def _down_stream(self, streams: Streams) -> Any:
        if self._down is None:
            self._down = streams.new()
        return self._down

    def _up_stream(self, streams: Streams) -> Any:
        if self._up is None:
            self._up = streams.new()
        return self._up

    @staticmethod
    def _copy(streams: Streams, stream: Any, source: Tensor, target: Tensor, kept: Tensor | None) -> Landing:
        stream.wait_stream(streams.current())
        with streams.within(stream):
            target.copy_(source, non_blocking=True)
        if kept is not None:
            streams.keep(kept, stream)
        return Landing(streams, stream)


class PendingIO(Protocol):
    """A read or a write under way."""

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            OSError: Naming the path, the place and the cause.
        """


class Tier(Protocol):
    """Places of records. Memory that is handed in is uint8, 1-D, page-aligned and of the record's size."""

    name: str

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for records of these bytes; raises OSError if there is none."""

    def resident(self, record: str) -> Tensor | None:
        """The record itself where it lies in host memory, else None."""

    def read(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to fill `memory` with a record that was written."""

    def write(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to write a record; `memory` stays as it is until it is done."""

    def staging(self, nbytes: int) -> Tensor:
        """Memory of `nbytes` bytes, at a page boundary, that reads and writes are fastest with."""

    def mark_partially_applied(self, records: Iterable[str], reason: str) -> None:
        """Refuse to read records until they are written anew: they are of two states."""

    def is_partially_applied(self, record: str) -> bool:
        """True if a record is refused."""

    def release(self, records: Iterable[str]) -> None:
        """Give the room of records back."""

    def close(self) -> None:
        """Wait for what is under way and give all room back."""


def wait_all(pending: Sequence[PendingIO]) -> None:
    """Wait for all, also where one has failed; raises the first error."""
    error: BaseException | None = None
    for each in pending:
        try:
            each.wait()
        except BaseException as caught:
            error = error or caught
    if error is not None:
        raise error


class HostMemory:
    """Bytes at the beginning of a page.

    Args:
        nbytes: Rounded up to whole pages.
        pinned: Register them with CUDA, so that copies are asynchronous.

    Attributes:
        bytes: uint8, 1-D, of `nbytes` bytes.
        pinned: Whether they are registered.
        reason: Why not, if that was asked for.

    Raises:
        ValueError: If `nbytes` is not positive.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        if nbytes <= 0:
            raise ValueError(f"host memory needs a positive number of bytes, got {nbytes}")
        self.nbytes = self.rounded(nbytes)
        mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # a kernel without it
                mapping.madvise(getattr(mmap, advice))
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.pinned, self.reason = False, ""
        if pinned:
            self._pin()

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Size that `nbytes` take: whole pages."""
        return -(-nbytes // PAGE) * PAGE

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            self.reason = "this torch sees no CUDA device"
            return
        address = self.bytes.data_ptr()
        with where_memory_is_held():
            code = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
            if code:
                forget_cuda_error()
        if code:
            self.reason = f"cudaHostRegister of {self.nbytes} bytes failed with error {code}"
            return
        self.pinned = True
        # Holds the mapping, so that it is not unmapped before it is unregistered.
        weakref.finalize(self, _unpin, self.bytes)


def _unpin(memory: Tensor) -> None:
    with where_memory_is_held():  # a finalizer runs in any thread
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
            _last_cuda_error()


def forget_cuda_error() -> None:
    """Let a call of the CUDA runtime that failed, and whose code was looked at, not fail what comes after it.

    The runtime keeps the code of the last call that failed in this thread until somebody asks. torch asks after each
    launch of a kernel, and would raise there for what went wrong here. Its binding of `cudaHostRegister` returns the
    code and does not ask.
    """
    if _last_cuda_error():
        return
    # The runtime that torch uses was not found by its symbol, or had nothing to tell. A launch asks torch's own.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)


def _last_cuda_error() -> int:
    """The code that the CUDA runtime keeps, which asking sets back; 0: none, or there is no such symbol."""
    # torch loads the runtime with global symbols. Another copy of it has a code of its own, which is 0.
    ask = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    return 0 if ask is None else int(ask())


class HostTier:
    """Records in host memory, which are used where they lie.

    Args:
        pinned: Page-lock them for copies from and to a CUDA device. torch's own pinned allocator would round every
            block up to a power of two, and keep what is given back.
    """

    name = "host"

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._records: dict[str, tuple[HostMemory, Tensor]] = {}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room; the memory is zeroed, and taken when it is first written to."""
        made: dict[str, tuple[HostMemory, Tensor]] = {}
        # Not together where nothing is pinned: a record's memory then goes when that is released.
        for together in _regions(sizes, _REGION if self._pinned else 0):
            memory = HostMemory(sum(HostMemory.rounded(max(nbytes, 1)) for _, nbytes in together), pinned=self._pinned)
            if self._pinned and not memory.pinned:
                # No more tries after a refusal, and so one warning for all.
                self._pinned = False
                warnings.warn(
                    f"offloaded state stays in pageable memory, from which copies are slower: {memory.reason} (see "
                    "`ulimit -l`)",
                    stacklevel=2,
                )
            begin = 0
            for name, nbytes in together:
                made[name] = memory, memory.bytes[begin : begin + nbytes]
                begin += HostMemory.rounded(max(nbytes, 1))  # each at a page, and one of no bytes has a page, too
        # Only now: where there is no memory for all of them, none is kept.
        self._records.update(made)

    def resident(self, record: str) -> Tensor | None:
        """The record itself."""
        return self._records[record][1]

    def read(self, record: str, memory: Tensor) -> Done:
        """Copy a record."""
        memory.copy_(self._records[record][1])
        return Done()

    def write(self, record: str, memory: Tensor) -> Done:
        """Replace a record."""
        self._records[record][1].copy_(memory)
        return Done()

    def staging(self, nbytes: int) -> Tensor:
        """Memory for reads and writes; nobody needs it here."""
        return HostMemory(nbytes).bytes

    def mark_partially_applied(self, records: Iterable[str], reason: str) -> None:
        """Nothing: a record in memory says nothing of its past, as a tensor does not."""

    def is_partially_applied(self, record: str) -> bool:
        """Never."""
        return False

    def release(self, records: Iterable[str]) -> None:
        """Give memory back, once nobody uses it."""
        for record in records:
            del self._records[record]

    def close(self) -> None:
        """Give all memory back."""
        self._records.clear()


_REGION = 256 << 20
"""Bytes that are page-locked at once; each call costs as much as locking thousands of pages. What is released goes
with the last record of its region."""


def _regions(sizes: Mapping[str, int], most: int) -> Iterator[list[tuple[str, int]]]:
    """Records that lie in one block of host memory of at most so many bytes; larger ones lie alone."""
    together: list[tuple[str, int]] = []
    taken = 0
    for name, nbytes in sizes.items():
        if together and taken + nbytes > most:
            yield together
            together, taken = [], 0
        together.append((name, nbytes))
        taken += HostMemory.rounded(max(nbytes, 1))
    if together:
        yield together


class Done:
    """A read or a write that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


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
        # It knows the table of files, not this object: files of a dropped tier are closed, too.
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._queue, self._files, self._process)

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
        # Again after each wait, which is without the lock: another thread may have begun a transfer meanwhile.
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

    def mark_partially_applied(self, records: Iterable[str], reason: str) -> None:
        """Refuse to read records until they are written anew."""
        with self._lock:
            for record in records:
                self._files[record].mark_partially_applied([record], reason)

    def is_partially_applied(self, record: str) -> bool:
        """True if a record is refused."""
        with self._lock:
            return record in self._files[record].partially_applied

    def release(self, records: Iterable[str]) -> None:
        """Give records up; a file goes with the last of its own."""
        with self._lock:
            touched = {id(file): file for file in (self._files.pop(record) for record in records)}
            kept = {id(file) for file in self._files.values()}
        # Nobody finds these files any more, and other threads go on while their transfers end.
        for identity, file in touched.items():
            if identity not in kept:
                file.close(self._lock)

    def close(self) -> None:
        """Wait for what is under way and give all room back."""
        if self._finalizer.detach() is None:  # it is closed, or another thread closes it
            return
        with self._lock:
            files = dict(self._files)
            self._files.clear()
        _close(self._queue, files, self._process, self._lock)


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


def _close(
    queue: FileQueue,
    files: dict[str, StateFile],
    process: int,
    lock: AbstractContextManager[object] | None = None,
) -> None:
    if os.getpid() != process:  # a forked child has no part in what is under way
        return
    try:
        for file in {id(file): file for file in files.values()}.values():
            file.close(lock)
    finally:
        # The queue last: closing a file waits for its requests in it.
        files.clear()
        queue.close()
