"""Collectives on whole buckets, in place, with a fixed order of summation, and exact counters of what is sent.

What carries them is chosen by the group and by the tensors' device (`transport`), which knows of nobody who looks on.
Here a watchdog and an observer are wrapped around it, and what is sent is counted. A watchdog knows every collective
from its beginning, and every wait for one; a strict one compares it with the other ranks' before it runs. An observer
hears when bytes begin and end to move, and of waits. A rank alone sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.process_group import end_with
from zero_strategy.comm.shared_memory import Scattered, decode_card, encode_card
from zero_strategy.comm.transport import (
    Collectives,
    DeviceCollectives,
    Fetch,
    HostCollectives,
    Job,
    Order,
    Run,
    WaitedOnce,
    Work,
)
from zero_strategy.runtime.observer import Observed, Span, Transfer
from zero_strategy.watchdog.flight_recorder import CollectiveLog, CollectiveRecord, Subject, TransportError

if TYPE_CHECKING:
    from zero_strategy.watchdog.watchdog import Watchdog


_UNWATCHED = nullcontext()
_AT_ONCE = nullcontext()


class Sized(NamedTuple):
    """The size of a collective by which ranks know that they are at the same one."""

    nbytes: int
    dtype: torch.dtype


class Instrumentation:
    """A watchdog and an observer of one group's collectives.

    Attributes:
        observed: Who is told what they do.
        track: By which a watchdog watches; None: no watchdog does.
        exchange_card: Brings every rank's card to a strict watchdog, in rank order; None: nothing is compared.
    """

    def __init__(self) -> None:
        self.observed = Observed()
        self.track: CollectiveLog | None = None
        self.exchange_card: Callable[[Tensor], list[Tensor]] | None = None
        self._closed = False

    def close(self) -> None:
        """Nobody looks on any more, and nothing can begin."""
        self._closed = True
        self.track = self.exchange_card = None

    def begin(
        self, kind: str, of: Subject, tensor: Tensor | Scattered | Sized | None = None
    ) -> CollectiveRecord | None:
        """A collective begins; returns how a watchdog knows it.

        Raises:
            DesyncError: If a watchdog knows that the ranks cannot go on together.
            RuntimeError: After `close`.
        """
        if self.track is None:
            # Asked only without a watchdog's track, since `close` takes that away: what runs often looks at one
            # attribute.
            if self._closed:
                raise RuntimeError(f"{kind} after the engine was closed; make a new engine")
            return None
        if tensor is None:
            return self.track.begin(kind, of)
        return self.track.begin(kind, of, tensor.nbytes, tensor.dtype)

    def begin_here(self, kind: str, of: Subject, tensor: Tensor | None = None) -> AbstractContextManager[Any]:
        """Begin a collective that this thread waits for now; gives it as `begin` does, or None."""
        return self.begin(kind, of, tensor) or _UNWATCHED

    def compare(self, watched: CollectiveRecord | None) -> None:
        """Wait until all ranks have told theirs, if a watchdog is strict.

        Raises:
            DesyncError: If they differ.
        """
        if self.exchange_card is not None and watched is not None:
            cards = self.exchange_card(encode_card(watched.text()))
            watched.compare([decode_card(card) for card in cards])

    def around(
        self, run: Run, kind: Transfer | None, sent: int, watched: CollectiveRecord | None, device: torch.device
    ) -> Run:
        """The job with watchdog and observer around it.

        Args:
            run: The transport's.
            kind: Of the collective; None: of a few numbers, of which an observer hears no bytes.
            sent: Bytes that this rank sends.
            watched: The collective, for a watchdog.
            device: Of its tensors.
        """
        # Nobody looks on: the transport's own job runs without a call around it.
        if watched is None and self.observed.observer is None:
            return run

        def seen() -> Work | None:
            if self.exchange_card is not None:
                self.compare(watched)  # inside of the job: its thread waits for other ranks, the caller does not
            ended = None if kind is None else self.observed.transfer(kind, sent)
            work = run()
            if work is not None and watched is not None:
                # A wait for a device's work does not hold the host, so the watchdog has to ask the work itself.
                watched.track.under_way(watched, work, device)
            if ended is None:
                return work
            if work is not None:
                return ObservedWork(work, ended)
            ended()
            return None

        return seen

    def reading(self) -> AbstractContextManager[Any]:
        """Inside, the host waits for what collectives have made on a device.

        Raises:
            DesyncError: If the ranks cannot go on together: what was read is no result.
        """
        return _UNWATCHED if self.track is None else self.track.reading()

    def pending(
        self,
        kind: Span,
        works: Sequence[Any],
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
        before: PendingWork | None = None,
    ) -> PendingWork:
        """Works of which the last is of this kind; one before it brings the own slice."""
        return PendingWork(works, self.observed, ("fetch", kind)[2 - len(works) :], watched, then, before)


class PendingWork:
    """A collective under way. `wait()` may be called any number of times; the first call finishes it.

    Args:
        works: What has to end, in order.
        observed: Who is told of waits.
        kinds: What each of the works is.
        watched: How a watchdog knows it.
        then: Called once, when all has ended.
        before: What began earlier, and is finished first.
    """

    def __init__(
        self,
        works: Sequence[Any],
        observed: Observed | None = None,
        kinds: Sequence[Span] = (),
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
        before: PendingWork | None = None,
    ) -> None:
        self._works = list(works)
        self._observed, self._kinds, self._watched, self._then = observed, kinds, watched, then
        self._before = before

    def wait(self) -> None:
        """Block until the result is in place (on a GPU: until the current stream will see it).

        Raises:
            DesyncError: If it never will be, where a watchdog watches.
        """
        # All are taken out before anything is waited for: a second call, also one after an error, does nothing.
        before, works, kinds, then = self._before, self._works, self._kinds, self._then
        self._before, self._works, self._kinds, self._then = None, [], (), None
        if before is not None:
            before.wait()
        if self._watched is None or not works:
            self._finish(works, kinds)
        else:
            # As a context it is the wait that a watchdog sees; for nothing there is none.
            with self._watched:
                self._finish(works, kinds)
        if then is not None:
            then()

    @property
    def holds_host(self) -> bool:
        """True if a wait holds the host: until a thread has carried it out, or gloo, which end with the transport."""
        return any(isinstance(work, (Future, WaitedOnce)) for work in self._works)

    def follow(self) -> Callable[[], None]:
        """A call that only waits for the works: a thread of the host, or a device's current stream, comes after them.

        Nothing is finished by it, neither for this object nor for those who look on.
        """
        works = [work.work if isinstance(work, ObservedWork) else work for work in self._works]

        def wait() -> None:
            for work in works:
                _finish(work)

        return wait

    def _finish(self, works: list[Any], kinds: Sequence[Span]) -> None:
        if self._observed is None or self._observed.observer is None:
            for work in works:
                _finish(work)
            return
        for kind, work in zip(kinds, works, strict=True):
            with self._observed.span(kind):
                _finish(work)


class ObservedWork:
    """Work of a device's own, whose end is when somebody waits for it.

    Args:
        work: Of the device.
        ended: Called then.

    Attributes:
        work: As above.
    """

    def __init__(self, work: Work, ended: Callable[[], None]) -> None:
        self.work, self._ended = work, ended

    def wait(self) -> None:
        """Wait for it."""
        self.work.wait()
        self._ended()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self.work.is_completed()


def _in_order(first: Callable[[], None], run: Run) -> Run:
    def both() -> Work | None:
        first()
        return run()

    return both


def _finish(work: Any) -> None:
    if isinstance(work, Future):
        # The job has made a broken connection a TransportError itself; its other errors pass as they are.
        work.result()
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(str(error)) from error


@dataclass
class CommunicationCounters:
    """Counts of bytes and elements that this rank sent since the last `reset`.

    Attributes:
        calls: Number of collectives by kind ("all_gather", "reduce_scatter", "broadcast", "control").
        elements: Elements of model state sent by kind. An all-gather of a bucket sends the own slice to each of the
            other N - 1 ranks (or passes N - 1 slices on, in a ring: the same number).
        bytes: The same in bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, elements: int, itemsize: int) -> None:
        """Record one collective in which this rank sends `elements` elements of `itemsize` bytes."""
        self.calls[kind] += 1
        self.elements[kind] += elements
        self.bytes[kind] += elements * itemsize

    @property
    def elements_sent(self) -> int:
        """Elements of model state sent by this rank, control messages left out."""
        return sum(count for kind, count in self.elements.items() if kind != "control")

    def reset(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.elements.clear()
        self.bytes.clear()


class Communicator:
    """Collectives of one group of ranks, on tensors of the CPU (gloo) or of a GPU (NCCL).

    Args:
        group: The process group, or None for a group of this rank alone.
        counters: Where what is sent gets counted.
        owns: The group ends when this object is garbage, unless it was closed (then whoever closes ends it).
        gpu_group: The same ranks in the same order on GPUs, for `all_gather_numbers`, where `group` is on the host.

    Attributes:
        closed: After `close`.
        numbers_on: The GPU from which few numbers go by its own collectives; None: they go by messages of the host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        counters: CommunicationCounters,
        *,
        owns: bool = False,
        gpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.counters, self.gpu_group = group, counters, gpu_group
        self.numbers_on: torch.device | None = None
        self._numbers = None if gpu_group is None else DeviceCollectives(gpu_group)
        self._host, self.by_device = HostCollectives(group), DeviceCollectives(group)
        self.rank, self.size = self._host.rank, self._host.size
        # NCCL alone has no connections on the host: control messages then go by way of the device.
        self._control: Collectives = self._host if self.on_host else self.by_device
        self._instrumentation = Instrumentation()
        self.closed = False
        # With the transport, not with this object: what is under way holds the transport.
        self._end = end_with(self._host, group) if owns and group is not None else None

    def close(self) -> None:
        """Let go of threads, buffers and the process group, which its maker ends. Later collectives raise."""
        self.closed = True
        if self._end is not None:
            # Whoever closes ends the group, in one order on all ranks; the finalizer would end it in another.
            self._end.detach()
        self.group = self.gpu_group = self._numbers = None
        self._instrumentation.close()
        self._host.close()
        self.by_device.close()

    @property
    def on_host(self) -> bool:
        """True if the ranks can exchange what is in host memory."""
        return self._host.available

    @property
    def track(self) -> CollectiveLog | None:
        """The watchdog's list of collectives under way; None: no watchdog looks."""
        return self._instrumentation.track

    @property
    def observed(self) -> Observed:
        """The observers; a mesh has one object for all of its communicators."""
        return self._instrumentation.observed

    def observed_by(self, observed: Observed) -> None:
        """Tell these observers from now on."""
        self._instrumentation.observed = observed

    def guarded(self, watchdog: Watchdog, name: str, host_group: dist.ProcessGroup | None = None) -> None:
        """Let a watchdog watch these collectives.

        Args:
            watchdog: Of the engine.
            name: Tells groups of the same ranks apart; equal on all of them.
            host_group: The same ranks on the host, for a strict watchdog's own messages, where the group is of a GPU's.
        """
        # One object may have several places in a mesh: `control` is the world group's where there is one data-parallel
        # group.
        if self.group is None or self.size == 1 or self.track is not None:
            return
        ranks = dist.get_process_group_ranks(self.group)
        self._instrumentation.track = watchdog.track(name, ranks, self.abort)
        if watchdog.strict:
            comparing = HostCollectives(host_group or self.group)
            if host_group is not None:
                # No communicator has this group, so nobody else would end it.
                end_with(comparing, host_group)
            self._instrumentation.exchange_card = comparing.exchange_card

    def unguarded(self) -> None:
        """The watchdog ends, and this object goes on."""
        self._instrumentation.track = None

    def warm_up(self, device: torch.device) -> None:
        """Connect the ranks for tensors of a device, if their first collective would do it; nothing on the CPU."""
        if self.group is None or device.type != "cuda":
            return
        self.by_device.warm_up(device)
        if self._numbers is not None:
            self._numbers.warm_up(device)
            self.numbers_on = device

    def send_numbers_by(self, other: Communicator, device: torch.device) -> None:
        """Send few numbers on a GPU in the group of another communicator, of the same ranks in the same order."""
        if other.size > 1 and other.is_native:
            self._numbers, self.numbers_on = other.by_device, device

    @property
    def is_native(self) -> bool:
        """True if tensors of a GPU go by its own library."""
        return self.by_device.is_native

    def abort(self) -> None:
        """Break this rank's connections, so that every wait for them ends."""
        self._host.abort()
        self.by_device.abort()
        if self.gpu_group is not None and self._numbers is not None:
            self._numbers.abort()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept from one exchange to the next."""
        return self._host.buffer_bytes

    def all_gather(
        self,
        flat: Tensor,
        first: Callable[[], Fetch | None] | None = None,
        of: Subject = "",
        after: PendingWork | None = None,
    ) -> PendingWork:
        """Fill `flat` (size x n elements) in place from every rank's own n-element slice.

        Args:
            flat: The buffer.
            first: Puts this rank's slice there; runs in the background too, where collectives do. On a device it
                gives what brings the slice, which the collective waits for there.
            of: What is gathered, for the watchdog's reports.
            after: See `all_reduce`.
        """
        if self.size == 1 or flat.numel() == 0:
            # Nothing is sent, but the own slice may still have to come from its tier.
            fetched = None if first is None else self._carrier(flat).start(first)
            works = [] if fetched is None else [fetched]
            return self._instrumentation.pending("fetch", works, before=after)
        carrier = self._carrier(flat)
        return self._start("all_gather", of, flat, carrier, carrier.all_gather(flat), first, after)

    def reduce_scatter(
        self,
        flat: Tensor,
        of: Subject = "",
        factor: float = 1.0,
        into: Tensor | None = None,
        order: Order | None = None,
    ) -> PendingWork:
        """Sum `flat` over the ranks; the rank's own slice of `flat`, or `into`, holds its part of the sum afterwards.

        The other slices keep the local values. On gloo the sum is taken in rank order.

        Args:
            flat: The buffer; size x n elements.
            of: What is reduced, for the watchdog's reports.
            factor: The whole sum is multiplied by it.
            into: Takes this rank's part; n elements.
            order: Of the additions, where it is not that of the ranks; `into` takes its results (n elements each).
        """
        if flat.numel() == 0:
            return PendingWork([])
        if self.size == 1 and order is not None:
            assert into is not None
            order.add_up([flat], [into], factor)
            return PendingWork([])
        if self.size == 1:
            total = flat if into is None else into.copy_(flat)
            if factor != 1.0:
                total.mul_(factor)
            return PendingWork([])
        carrier = self._carrier(flat)
        return self._start("reduce_scatter", of, flat, carrier, carrier.reduce_scatter(flat, into, factor, order))

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """True if `reduce_scatter_scattered` is there for so many elements. Ranks may differ in what they use."""
        return self._host.takes_scattered(numel, dtype)

    def reduce_scatter_scattered(
        self, source: Scattered, into: Tensor, of: Subject = "", factor: float = 1.0, order: Order | None = None
    ) -> PendingWork:
        """Reduce-scatter a flat buffer from where its parts lie; all peers get their slices alike.

        Args:
            source: The parts, of size x n elements; nobody changes them before the end.
            into: Takes this rank's part of the sum; n elements.
            of: What is reduced, for the watchdog's reports.
            factor: The whole sum is multiplied by it.
            order: See `reduce_scatter`.
        """
        job = self._host.reduce_scatter_scattered(source, into, factor, order)
        return self._start("reduce_scatter", of, source, self._host, job)

    def all_reduce(
        self, flat: Tensor, of: Subject = "", factor: float = 1.0, after: PendingWork | None = None
    ) -> PendingWork:
        """Sum `flat` over the ranks in place, on gloo in rank order. `flat.numel()` is a multiple of the group's size.

        Args:
            flat: The buffer.
            of: What is reduced, for the watchdog's reports.
            factor: The sum is multiplied by it.
            after: What has to end before; waiting for the result finishes it, too. On a device the stream that is
                current now waits for it, as all that is queued there from now on does.
        """
        if flat.numel() == 0:
            return self._instrumentation.pending("reduce_scatter", [], before=after)
        if self.size == 1:
            # Not before `after` has ended, which may still write to the buffer.
            return PendingWork([], then=None if factor == 1.0 else lambda: flat.mul_(factor), before=after)
        carrier = self._carrier(flat)
        job = carrier.all_reduce(flat, factor)
        if job is not None:
            return self._start("all_reduce", of, flat, carrier, job, None, after)
        job = carrier.reduce_scatter(flat, None, factor)
        summed = self._start("reduce_scatter", of, flat, carrier, job, None, after)
        # The gather sends what the reduction leaves here, so it comes after that; one wait finishes both.
        return self._start("all_gather", of, flat, carrier, carrier.all_gather(flat), None, summed)

    def broadcast(self, tensor: Tensor, source: int, of: Subject = "") -> None:
        """Copy `tensor` from group rank `source` to all ranks, in place."""
        if self.size == 1 or tensor.numel() == 0:
            return
        sent = self._count("broadcast", tensor) if self.rank == source else 0
        instrumentation, span = self._instrumentation, self._instrumentation.observed.span
        with instrumentation.begin_here("broadcast", of, tensor) as watched, span("broadcast", nbytes=sent):
            instrumentation.compare(watched)
            self._carrier(tensor).broadcast(tensor, source)

    def all_gather_small(self, value: Tensor, of: Subject = "") -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order. For flags and norms."""
        if self.size == 1:
            return [value]
        span = self.observed.span("control", nbytes=self._count("control", value))
        with self._instrumentation.begin_here("exchange", of, value) as watched, span:
            self._instrumentation.compare(watched)
            return self._control.all_gather_small(value)

    def all_gather_numbers(self, value: Tensor, of: Subject = "") -> Tensor:
        """Every rank's few numbers, in rank order, where they are: on a GPU its stream waits for them, not the host.

        On a GPU it is a sum with zeros, which is exact and takes NCCL log2(ranks) rounds, where a gather goes round
        them all. The sign of a zero is lost.

        Args:
            value: Of the same shape on all ranks, on `numbers_on`.
            of: What they are, for the watchdog's reports.
        """
        everyone = value.new_zeros((self.size, *value.shape))
        everyone[self.rank].copy_(value)
        if self.size == 1:
            return everyone
        flat, instrumentation = everyone.view(-1), self._instrumentation
        carrier = self._host if self._numbers is None or flat.is_cpu else self._numbers
        sent = self._count("control", value)
        watched = instrumentation.begin("all_reduce", of, flat)
        job = carrier.all_reduce(flat, 1.0) or carrier.all_gather(flat)
        started = carrier.start(instrumentation.around(job.run, None, sent, watched, flat.device))
        instrumentation.pending("control", [] if started is None else [started], watched, job.then).wait()
        return everyone

    def to_host(self, value: Tensor) -> Tensor:
        """Copy to the host what these ranks have computed together; it waits for the device, and so for the ranks.

        The watchdog looks at the collectives that the device has under way.

        Raises:
            DesyncError: If they never end, where a watchdog watches.
        """
        with self._instrumentation.reading(), self.observed.span("control"):
            return value.cpu()

    def all_to_all(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int, of: Subject = ""
    ) -> PendingWork:
        """Send outgoing[r] to each other rank r, while incoming[r] arrives from it. Messages may have any sizes.

        Args:
            outgoing: By rank: flat, contiguous, of one dtype. The own one is left alone; nobody changes them before
                the end.
            incoming: Likewise, of the size of what that rank sends.
            most: Elements of the largest message between any two ranks; the same on all.
            of: What is exchanged, for the watchdog's reports.
        """
        if self.size == 1 or most == 0:
            return PendingWork([])
        own = outgoing[self.rank]
        sent = sum(tensor.numel() for rank, tensor in enumerate(outgoing) if rank != self.rank)
        self.counters.add("all_to_all", sent, own.itemsize)
        carrier, instrumentation = self._carrier(own), self._instrumentation
        # Ranks send different amounts. Only the largest message has one size on all of them, as a comparison needs.
        watched = instrumentation.begin("all_to_all", of, Sized(most * own.itemsize, own.dtype))
        job = carrier.all_to_all(outgoing, incoming, most)
        run = instrumentation.around(job.run, "all_to_all", sent * own.itemsize, watched, own.device)
        started = carrier.start(run)
        return instrumentation.pending("all_to_all", [] if started is None else [started], watched, job.then)

    def all_gather_objects(self, value: Any, of: Subject = "") -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        with self._instrumentation.begin_here("all_gather_objects", of) as watched, self.observed.span("control"):
            self._instrumentation.compare(watched)
            return self._control.all_gather_objects(value)

    def _carrier(self, tensor: Tensor) -> Collectives:
        """The transport for such a tensor: one group may have connections for either kind of device."""
        return self._host if tensor.is_cpu else self.by_device

    def _start(
        self,
        kind: Literal["all_gather", "reduce_scatter", "all_reduce"],
        of: Subject,
        flat: Tensor | Scattered,
        carrier: Collectives,
        job: Job,
        first: Callable[[], Fetch | None] | None = None,
        after: PendingWork | None = None,
    ) -> PendingWork:
        """Begin a collective in which every other rank gets one slice of as many as there are ranks, or two."""
        instrumentation, itemsize = self._instrumentation, flat.dtype.itemsize
        numel = flat.nbytes // itemsize // self.size * (self.size - 1)
        parts: tuple[Literal["all_gather", "reduce_scatter"], ...]
        parts = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        for part in parts:
            self.counters.add(part, numel, itemsize)
        # In the caller's thread, before anything is queued: numbers follow the calls, and a known failure raises here.
        watched = instrumentation.begin(kind, of, flat)
        # Queued before the collective, which sends the slice that this brings.
        fetched = None if first is None else carrier.start(first)
        sent = len(parts) * numel * itemsize
        run = instrumentation.around(job.run, parts[0], sent, watched, flat.device)
        # A thread of the host keeps the order by itself; a device's own work is followed on its stream.
        with _AT_ONCE if fetched is None or isinstance(fetched, Future) else cast(Fetch, fetched).after():
            started = carrier.start(run if after is None else _in_order(after.follow(), run))
        works = [work for work in (fetched, started) if work is not None]
        return instrumentation.pending(parts[0], works, watched, job.then, after)

    def _count(self, kind: str, tensor: Tensor) -> int:
        """Count what goes to every other rank as it is; returns the bytes."""
        numel, itemsize = tensor.numel() * (self.size - 1), tensor.element_size()
        self.counters.add(kind, numel, itemsize)
        return numel * itemsize
