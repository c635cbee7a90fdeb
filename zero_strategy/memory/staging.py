"""A fixed number of buffers through which records pass: the next ones are read and the last ones written meanwhile.

    ring = StagingRing(buffers=4, buffer_bytes=64 << 20)
    with ring.update(state, ["layers.0", "layers.1", ...]) as parts:
        for part in parts:                      # its bytes are there
            change(part.view.view(torch.float32))
                                                # going on writes it

    buffer 0   read 0 | change 0 | write 0          | read 4 ...
    buffer 1            read 1   | change 1 | write 1
    buffer 2                       read 2   | change 2 | write 2

A pass that stops before its end, by an exception or a `break`, waits for what is under way. If it had written nothing
the file is as before. Else its records are of two states: all of them are marked torn in the file, which refuses to
read them until they are written anew, as loading a checkpoint does.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from torch import Tensor

from zero_strategy.memory.file_queue import FileQueue
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.spans import Span, padded, parts_of
from zero_strategy.memory.state_file import StateFile, Transfer

Items = Iterable[str | Span | Sequence[str | Span]]
"""Each a record, a part of one, or several that are needed together, such as a weight and its moments."""


class StagingRing:
    """Buffers in one mapping. One pass at a time.

    Args:
        buffers: How many; one is worked on, the others are being filled or written.
        buffer_bytes: Of each, rounded up to whole pages; longer records pass in parts.
        pinned: For copies from and to a CUDA device.

    Attributes:
        memory: All buffers.
        nbytes: All that the ring ever takes.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(self, buffers: int, buffer_bytes: int, *, pinned: bool = False) -> None:
        if buffers < 1 or buffer_bytes < 1:
            raise ValueError(f"a staging ring needs buffers with bytes, got {buffers} of {buffer_bytes} bytes")
        self.buffers, self.buffer_bytes = buffers, padded(buffer_bytes, 4096)
        self.memory = HostMemory(buffers * self.buffer_bytes, pinned=pinned)
        self.nbytes = self.memory.nbytes
        self._registered: weakref.WeakSet[FileQueue] = weakref.WeakSet()
        self._pass: Pass | None = None

    def update(self, state: StateFile, items: Items) -> Pass:
        """Reads each item, lends it to be changed in place, and writes it."""
        return Pass(self, state, items, "update")

    def read(self, state: StateFile, items: Items) -> Pass:
        """Reads each item, and writes nothing."""
        return Pass(self, state, items, "read")

    def write(self, state: StateFile, items: Items) -> Pass:
        """Lends a buffer for each item, with whatever is in it, to be filled, and writes it."""
        return Pass(self, state, items, "write")

    def _begin(self, one: Pass, queue: FileQueue) -> None:
        if self._pass is not None:
            raise RuntimeError("this staging ring is in a pass already: end that one first, or use another ring")
        self._pass = one
        if queue not in self._registered:
            self._registered.add(queue)
            queue.register(self.memory.bytes)

    def _end(self) -> None:
        self._pass = None

    def _buffer(self, number: int) -> Tensor:
        return self.memory.bytes[number * self.buffer_bytes : (number + 1) * self.buffer_bytes]


@dataclass(eq=False)
class Part:
    """What is in one buffer, until the loop goes on. A device's copies from and to it must have ended by then.

    Attributes:
        spans: Which bytes of which records.
        views: Those bytes, one tensor per span: uint8, 1-D, at the beginning of a page.
        changed: Set it to False, and nothing is written.
    """

    spans: tuple[Span, ...]
    views: tuple[Tensor, ...]
    changed: bool = True

    @property
    def view(self) -> Tensor:
        """The bytes of the only span."""
        (only,) = self.views
        return only


@dataclass
class PassCounts:
    """Of a pass so far.

    Attributes:
        parts: That were lent.
        bytes_read, bytes_written: Of records, without padding.
        waited_seconds: In which the drive was slower than who works on the parts.
    """

    parts: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    waited_seconds: float = 0.0


@dataclass(eq=False)
class _Held:
    """A buffer, its part, and what is under way with it."""

    buffer: int
    part: Part
    room: tuple[Tensor, ...]
    transfers: list[Transfer]


class Pass:
    """See `StagingRing`; enter it, and iterate once.

    Attributes:
        counts: What it has done.
    """

    def __init__(self, ring: StagingRing, state: StateFile, items: Items, kind: Literal["update", "read", "write"]):
        self._ring, self._state, self._kind = ring, state, kind
        self._parts = parts_of(items, state.records, ring.buffer_bytes, state.alignment)
        between = max(ring.buffers // 2, 1) if ring.buffers < 4 else (ring.buffers - 1) // 2
        self._ahead = {"read": ring.buffers - 1, "write": 0, "update": min(between, ring.buffers - 1)}[kind]
        self._free = list(range(ring.buffers))
        self._coming: deque[_Held] = deque()
        self._writing: deque[_Held] = deque()
        self._current: _Held | None = None
        self._begun = self._written = 0
        self._complete = False
        self.counts = PassCounts()

    def __enter__(self) -> Pass:
        self._ring._begin(self, self._state.queue)
        return self

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._parts)

    def __next__(self) -> Part:
        """The next part.

        Raises:
            OSError, TornRecordError, CorruptRecordError: Of the transfers of this part or an earlier one.
            RuntimeError: If the pass has not been entered.
        """
        if self._ring._pass is not self:
            raise RuntimeError("enter the pass first: with ring.update(...) as parts")
        self._give_back()
        while self._begun < len(self._parts) and self._begun <= self.counts.parts + self._ahead:
            self._begin(self._parts[self._begun])
        if not self._coming:
            while self._writing:
                self._wait_for_oldest_write()
            self._complete = True
            raise StopIteration
        self._wait(self._coming[0].transfers)
        self._current = self._coming.popleft()
        self.counts.parts += 1
        return self._current.part

    def _begin(self, spans: tuple[Span, ...]) -> None:
        """Takes a buffer for a part and begins to read it."""
        while self._writing and self._writing[0].transfers[-1].done():
            self._wait_for_oldest_write()
        if not self._free:
            self._wait_for_oldest_write()
        number, at, room = self._free.pop(), 0, []
        for span in spans:
            end = at + padded(span.nbytes, self._state.alignment)
            room.append(self._ring._buffer(number)[at:end])
            at = end
        views = tuple(memory[: span.nbytes] for memory, span in zip(room, spans, strict=True))
        held = _Held(number, Part(spans, views), tuple(room), [])
        self._begun += 1
        self._coming.append(held)
        if self._kind != "write":
            for span, memory in zip(spans, room, strict=True):
                held.transfers.append(self._state.read(span.record, memory, span.start))
                self.counts.bytes_read += span.nbytes

    def _give_back(self) -> None:
        """Begins to write the part that was lent."""
        held, self._current = self._current, None
        if held is None:
            return
        held.transfers = []
        if self._kind == "read" or not held.part.changed or not held.part.spans:
            self._free.append(held.buffer)
            return
        self._writing.append(held)
        self._written += 1
        for span, memory in zip(held.part.spans, held.room, strict=True):
            held.transfers.append(self._state.write(span.record, memory, span.start))
            self.counts.bytes_written += span.nbytes

    def _wait_for_oldest_write(self) -> None:
        self._wait(self._writing[0].transfers)
        self._free.append(self._writing.popleft().buffer)

    def _wait(self, transfers: list[Transfer]) -> None:
        begin = time.perf_counter()
        try:
            for transfer in transfers:
                transfer.wait()
        finally:
            self.counts.waited_seconds += time.perf_counter() - begin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ring._pass is not self:
            return
        try:
            if not self._complete:
                self._settle()
        finally:
            if not self._complete and self._written:
                self._mark_torn(f"{type(error).__name__}: {error}" if error is not None else "it was left")
        self._ring._end()

    def _mark_torn(self, why: str) -> None:
        names = list(dict.fromkeys(span.record for part in self._parts for span in part))
        reached = f"part {self.counts.parts} of {len(self)}"
        self._state.mark_torn(names, f"a pass over {len(names)} records ended at {reached}: {why}")

    def _settle(self) -> None:
        """Waits until nothing uses the buffers any more. If the drive is silent, they are never lent again."""
        for held in [*self._coming, *self._writing]:
            for transfer in held.transfers:
                try:
                    transfer.wait()
                except TimeoutError:
                    raise
                except (OSError, RuntimeError):  # the first one is being raised already, or nobody needs the bytes
                    continue
