"""A device on paper with time: how long its streams are busy, and what torch's caching allocator would take meanwhile.

The host queues operations at a pace of its own; each stream carries its own out one after the other, and waits for
events. Memory follows the allocator's rule (CUDACachingAllocator): a block belongs to the stream that took it and is
handed out again on that stream as soon as the host has freed it. One that was kept for another stream (`record_stream`)
comes back only when the host, asking for memory, sees that that stream has passed the point at which it was freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.device.recorder import HOST, Memory, Recorder, _bytes_of

TIME = "time"
"""Key of a stream's clock: until when it is busy; who waits for the clock waits for that, too."""


@dataclass
class Block:
    """Memory of the device in use."""

    reference: StorageWeakRef
    nbytes: int
    stream: str
    noted: Memory
    fresh: bool
    """It was not in use before."""


class TimedDevice(Recorder):
    """The device.

    Args:
        cost: Time that an operation takes: by its stream, its name and the bytes that it touches.
        queueing: Time that the host needs to queue one.

    Attributes:
        reserved: Bytes that the allocator has taken of the device; it gives none back.
        idle: Time for which the computing stream had nothing to do but to wait, since its first operation.
    """

    def __init__(self, cost: Callable[[str, str, int], int], queueing: int = 1) -> None:
        super().__init__()
        self.reserved = self.idle = 0
        self._cost, self._queueing = cost, queueing
        self._blocks: dict[int, Block] = {}
        self._free: dict[str, list[int]] = defaultdict(list)
        self._deferred: list[tuple[int, str, int]] = []
        self._outside: set[int] = set()
        self._passed = 0  # the end of the last operation that computes; the clock may be further, after a wait

    def time(self, stream: str = HOST) -> int:
        """Time until which the host, or a stream, is busy."""
        return self.clock(stream).get(TIME, 0)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Memory that was taken before."""
        self._outside |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def operation(self, what: str, read: list[Tensor], written: list[Tensor], stream: str | None = None) -> None:
        """See `Recorder`."""
        tensors = [tensor for tensor in (*read, *written) if tensor.numel()]
        if tensors and all(self._memory(tensor).host for tensor in tensors):
            stream = HOST
        stream = stream or self.current().name
        super().operation(what, read, written, stream)
        began = self.time(stream)
        ended = self.clock(stream)[TIME] = began + self._cost(stream, what, sum(tensor.nbytes for tensor in tensors))
        if stream == self.computing.name:
            self.idle += began - self._passed if self._passed else 0
            self._passed = ended
        host = self.clock(HOST)
        host[TIME] = host.get(TIME, 0) + self._queueing

    # ---- memory ----

    def make_host(self, tensor: Tensor) -> None:
        """See `Recorder`; it is no memory of the device, then."""
        super().make_host(tensor)
        block = self._blocks.pop(tensor.untyped_storage()._cdata, None)
        if block is not None and block.fresh:
            self.reserved -= block.nbytes
        elif block is not None:
            self._free[block.stream].append(block.nbytes)

    def _memory(self, tensor: Tensor) -> Memory:
        found = super()._memory(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._blocks.get(key)
        if known is not None and known.noted is not found:
            self._release(self._blocks.pop(key))
            known = None
        if known is None and not found.host and storage.nbytes() and key not in self._outside:
            fresh = self._take(found.stream, storage.nbytes())
            self._blocks[key] = Block(found.reference, storage.nbytes(), found.stream, found, fresh)
        return found

    def look(self) -> None:
        """See `Recorder`."""
        for key, block in list(self._blocks.items()):
            if block.reference.expired() or not _bytes_of(block.reference):
                self._release(self._blocks.pop(key))
        super().look()

    def _take(self, stream: str, nbytes: int) -> bool:
        """Take memory; true if there was none that could be used again."""
        now, waiting = self.time(), self._deferred
        self._deferred = [each for each in waiting if each[0] > now]
        for at, home, size in waiting:
            if at <= now:
                self._free[home].append(size)
        fitting = [size for size in self._free[stream] if size >= nbytes]
        if fitting:
            self._free[stream].remove(min(fitting))
        else:
            self.reserved += nbytes
        return not fitting

    def _release(self, block: Block) -> None:
        kept = block.noted.kept - {block.stream}
        if kept:
            self._deferred.append((max(map(self.time, kept)), block.stream, block.nbytes))
        else:
            self._free[block.stream].append(block.nbytes)
