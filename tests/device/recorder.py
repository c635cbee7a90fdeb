"""A device on paper: what is computed is computed at once; what each of its streams would touch, and when, is noted.

Operations reach it by torch's dispatcher, streams and events by the interface that the product's own code uses, and
collectives by a transport that puts them on a stream of their own. Every stream has a vector clock; an operation that
touches what another stream touches, one of the two writing, must come after it by waits. So must the return of memory
to the allocator, which hands it out on the stream that allocated it, unless it is kept for the other stream.

Memory that torch did not allocate (`HostMemory`) is the host's, and pinned; memory that is made without naming a device
is the host's as well, and not pinned (`host_waits`). Operations among such tensors alone are the host's own, and must
come after what streams do there by waits of the host. The host waits for the device in events, in blocking copies
between the two, and where it reads what the device has computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.device.host_waits import INDEXED, blocks_host, host_reads
from zero_strategy.comm.transport import Collectives, Job

HOST = "the host"
_NO_VALUES = ("aten.empty", "aten.view", "aten.as_strided", "aten.detach", "aten.alias", "aten.set_", "aten.slice")
Clock = dict[str, int]


@dataclass
class Access:
    """One operation's touch of a range of bytes."""

    stream: str
    tick: int
    start: int
    stop: int
    writes: bool
    what: str


@dataclass
class Memory:
    """A storage: who allocated it, for whom it is kept, and what touched it."""

    reference: StorageWeakRef
    stream: str
    host: bool
    pinned: bool = True
    """Of the host's."""
    kept: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)
    taken: int = 0
    """Operations of that stream before it was taken: they may have used the same memory for something else."""


@dataclass
class Collective:
    """A collective, and how much is computed beside it.

    Attributes:
        what: Its kind.
        tick: Of its stream, when it is over.
        begun: Operations that the computing stream had got when it began.
        beside: Operations that stream got until it waited for it; None: it has not.
    """

    what: str
    stream: str
    tick: int
    begun: int
    beside: int | None = None


class Event:
    """A point of a stream."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.recorder, self.clock = recorder, clock

    def query(self) -> bool:
        """True if it has come: always, as everything is done at once. The thread that computes then knows."""
        if threading.get_ident() == self.recorder.thread:  # others look, too, and queue nothing
            self.recorder.look()
            self.recorder.learn(HOST, self.clock)
        return True

    def synchronize(self) -> None:
        """The host waits for it; another thread finds it there, and what it does is not the host's."""
        if threading.get_ident() != self.recorder.thread:
            return
        self.recorder.look()
        self.recorder.syncs.append("an event")
        self.recorder.learn(HOST, self.clock)


class Stream:
    """A queue, with the methods of CUDA's in torch that the product uses."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_stream(self, other: Stream) -> None:
        """Let what is queued from now on wait for all that is queued there."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for the event."""
        self.recorder.look()
        self.recorder.learn(self.name, event.clock)

    def synchronize(self) -> None:
        """The host waits for all that is queued so far."""
        self.record_event().synchronize()

    def record_event(self) -> Event:
        """All that is queued so far."""
        return Event(self.recorder, dict(self.recorder.clock(self.name)))


class Recorder(TorchDispatchMode):
    """The device; as a context manager it takes notes of the operations inside.

    Attributes:
        races: Sentences about what was found; empty if everything waits as it has to.
        syncs: Places at which the host waited for the device.
        collectives: All so far, in the order in which they began.
        thread: The one that computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.syncs: list[str] = []
        self.collectives: list[Collective] = []
        self._unseen: list[Collective] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._memories: dict[int, Memory] = {}
        self._made = 0
        self.computing = Stream(self, "computing")
        self._current = self.computing
        self._inside: list[ExitStack] = []
        self.thread = threading.get_ident()

    def __enter__(self) -> Recorder:
        """Take notes."""
        self._inside.append(ExitStack())
        self._inside[-1].enter_context(host_reads(self))
        entered: Recorder = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        """No more notes."""
        super().__exit__(*error)
        self._inside.pop().close()

    # ---- streams, as the product asks for them ----

    def streams_of(self, device: torch.device) -> Recorder | Elsewhere:
        """The queues of a device, of which there is one."""
        return self

    def new(self) -> Stream:
        """See `Streams`."""
        self._made += 1
        return Stream(self, f"stream {self._made}")

    def current(self) -> Stream:
        """See `Streams`."""
        return self._current

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """See `Streams`."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """See `Streams`."""
        self._memory(tensor).kept.add(stream.name)

    # ---- clocks ----

    def clock(self, stream: str) -> Clock:
        """Operations that a stream, or the host, knows to be over."""
        return self._clocks.setdefault(stream, {})

    def learn(self, stream: str, clock: Clock) -> None:
        """It waits for all that a clock tells."""
        own = self.clock(stream)
        for other, tick in clock.items():
            own[other] = max(own.get(other, 0), tick)
        if stream == self.computing.name:
            for one in self._unseen:
                if own.get(one.stream, 0) >= one.tick:
                    one.beside = own.get(stream, 0) - one.begun
            self._unseen = [one for one in self._unseen if one.beside is None]

    def begin(self, what: str, stream: str) -> None:
        """A collective has been queued there just now."""
        begun = self.clock(self.computing.name).get(self.computing.name, 0)
        one = Collective(what, stream, self.clock(stream)[stream], begun)
        self.collectives.append(one)
        self._unseen.append(one)

    def _is_over(self, access: Access, stream: str) -> bool:
        return access.stream == stream or self.clock(stream).get(access.stream, 0) >= access.tick

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and note what it touches."""
        result = func(*args, **(kwargs or {}))
        self.look()
        name = str(func).rpartition(".")[0]
        if any(name.startswith(f"{one}") for one in _NO_VALUES):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    memory = self._memory(tensor)
                    if name.startswith("aten.empty") and not memory.accesses:
                        memory.taken = self.clock(memory.stream).get(memory.stream, 0)
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in INDEXED and self.is_host(args[0]):
            for place in args[1]:
                if isinstance(place, Tensor):
                    self.make_host(place)
        self._note_made(given, result)
        self.operation(name, *_touched(func, args, kwargs or {}, result))
        if what := blocks_host(func, args, kwargs or {}, given, self):
            self.host_waits(what)
        return result

    def is_host(self, tensor: Tensor) -> bool:
        """See `Device`."""
        return self._memory(tensor).host

    def is_pinned(self, tensor: Tensor) -> bool:
        """See `Device`."""
        return self._memory(tensor).pinned

    def make_host(self, tensor: Tensor) -> None:
        """See `Device`."""
        memory = self._memory(tensor)
        memory.host, memory.pinned = True, False
        memory.accesses = []  # it was made, not computed

    def host_waits(self, what: str) -> None:
        """See `Device`."""
        self.syncs.append(what)
        self.learn(HOST, self.clock(self._current.name))

    def _note_made(self, given: list[Tensor], result: Any) -> None:
        """Results of tensors of the host alone are the host's."""
        if not given or not all(map(self.is_host, given)):
            return
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in known:
                self.make_host(made)

    def operation(self, what: str, read: list[Tensor], written: list[Tensor], stream: str | None = None) -> None:
        """Something is queued on a stream, the current one unless it is given, that touches these."""
        tensors = [tensor for tensor in (*read, *written) if tensor.numel()]
        memories = [self._memory(tensor) for tensor in tensors]
        if memories and all(memory.host for memory in memories):
            stream = HOST
        stream = stream or self._current.name
        self.learn(stream, self.clock(HOST))  # it is queued after what the host has waited for
        tick = self.clock(stream)[stream] = self.clock(stream).get(stream, 0) + 1
        for tensor, memory in zip(tensors, memories, strict=True):
            start, stop = _extent(tensor)
            access = Access(stream, tick, start, stop, any(tensor is one for one in written), what)
            self._compare(access, memory)
            memory.accesses = [one for one in memory.accesses if not self._is_covered(one, access)]
            memory.accesses.append(access)

    def _compare(self, new: Access, memory: Memory) -> None:
        elsewhere = new.stream != memory.stream and not memory.host
        if elsewhere and self.clock(new.stream).get(memory.stream, 0) < memory.taken:
            self._tell(f"{new.what} on {new.stream} does not wait for {memory.stream}, which took the memory")
        for old in memory.accesses:
            meets = old.start < new.stop and new.start < old.stop and (old.writes or new.writes)
            if meets and not self._is_over(old, new.stream):
                self._tell(f"{new.what} on {new.stream} does not wait for {old.what} on {old.stream}")

    @staticmethod
    def _is_covered(old: Access, new: Access) -> bool:
        inside = new.start <= old.start and old.stop <= new.stop
        return inside and old.stream == new.stream and (new.writes or not old.writes)

    def _tell(self, race: str) -> None:
        if race not in self.races:
            self.races.append(race)

    # ---- memory ----

    def _memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._memories.get(key)
        if known is None or known.reference.expired():
            known = Memory(StorageWeakRef(storage), self._current.name, host=not storage.resizable())
            self._memories[key] = known
        return known

    def look(self) -> None:
        """See which memory has been given back since the last look."""
        alive = torch.UntypedStorage._new_with_weak_ptr  # None if nobody holds it any more
        for key, memory in list(self._memories.items()):
            if not memory.accesses or memory.host:
                continue
            # This is asked for each memory after each operation: one call, not those of `_bytes_of` as well.
            storage = alive(memory.reference.cdata)
            if storage is None or not storage.nbytes():
                for access in memory.accesses:
                    known = self._is_over(access, memory.stream) or self._is_over(access, HOST)
                    if not (known or access.stream in memory.kept):
                        self._tell(f"memory is given back to {memory.stream} while {access.stream} does {access.what}")
                if storage is None:
                    del self._memories[key]
                else:
                    memory.accesses, memory.kept = [], set()


class Elsewhere:
    """Streams of another device of the same process, on which nothing is queued: what names no device may mean it."""

    def __init__(self, recorder: Recorder) -> None:
        self._computing = Stream(recorder, "computing elsewhere")

    def current(self) -> Stream:
        """See `Streams`."""
        return self._computing


class RecordedCollectives(Collectives):
    """Collectives of a device, on a stream of the group's own; each rank's part is taken for this rank's."""

    device = "cpu"

    def __init__(self, group: Any, recorder: Recorder) -> None:
        super().__init__(group)
        self.available = True
        self.recorder = recorder
        self.stream = recorder.new()
        self.buffer_bytes = 0

    def start(self, run: Callable[[], Any]) -> Any:
        """As a device's: queued now."""
        return run()

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """As a device: never."""
        return False

    def all_gather(self, flat: Tensor) -> Job:
        """See `Collectives`."""

        def run() -> RecordedWork:
            # In place: the own slice is sent from there, and not written to.
            with torch.utils._python_dispatch._disable_current_modes():
                slices = list(flat.chunk(self.size))
            own = slices.pop(self.rank)
            return self._queue("all_gather", [own], slices)

        return Job(run)

    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float, order: Any = None) -> Job:
        """See `Collectives`."""
        own = flat.chunk(self.size)[self.rank]
        total = own if into is None else into

        def run() -> RecordedWork:
            with torch.utils._python_dispatch._disable_current_modes():
                total.copy_(own * self.size)
            return self._queue("reduce_scatter", [flat], [total])

        return Job(run, None if factor == 1.0 else lambda: total.mul_(factor))

    def all_reduce(self, flat: Tensor, factor: float) -> Job:
        """See `Collectives`."""

        def run() -> RecordedWork:
            with torch.utils._python_dispatch._disable_current_modes():
                flat.mul_(self.size)
            return self._queue("all_reduce", [], [flat])

        return Job(run, None if factor == 1.0 else lambda: flat.mul_(factor))

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int) -> Job:
        """See `Collectives`."""
        sent, wanted = (
            [each for rank, each in enumerate(all_of) if rank != self.rank] for all_of in (outgoing, incoming)
        )

        def run() -> RecordedWork:
            with torch.utils._python_dispatch._disable_current_modes():
                for tensor in wanted:
                    tensor.fill_(0.1)
            return self._queue("all_to_all", sent, wanted)

        return Job(run)

    def _queue(self, what: str, read: list[Tensor], written: list[Tensor]) -> RecordedWork:
        self.stream.wait_stream(self.recorder.current())
        self.recorder.operation(what, read, written, self.stream.name)
        self.recorder.begin(what, self.stream.name)
        return RecordedWork(self, self.stream.record_event(), [*read, *written])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """See `Collectives`."""

    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """See `Collectives`."""
        return [value] * self.size

    def all_gather_objects(self, value: Any) -> list[Any]:
        """See `Collectives`."""
        return [value] * self.size


class RecordedWork:
    """As torch's: it holds the tensors until somebody has waited for it."""

    def __init__(self, collectives: RecordedCollectives, event: Event, tensors: list[Tensor]) -> None:
        self._collectives, self._event, self._tensors = collectives, event, tensors

    def wait(self) -> None:
        """Let what is queued from now on wait for it."""
        self._collectives.recorder.current().wait_event(self._event)
        self._tensors = []

    def is_completed(self) -> bool:
        """See `Work`."""
        return True


def _touched(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operation reads, and those that it writes, by its schema."""
    written: list[Tensor] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    for name, value in kwargs.items():
        if name == "out":
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    read = [leaf for leaf in read if not any(leaf is one for one in written)]
    known = {leaf.untyped_storage()._cdata for leaf in (*read, *written)}
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return read, written + [leaf for leaf in made if leaf.untyped_storage()._cdata not in known]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and one past the last, in the tensor's storage."""
    start = tensor.storage_offset()
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (last + 1) * tensor.element_size()


def _bytes_of(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())
