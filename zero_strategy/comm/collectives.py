"""Collectives on whole buckets, in place, with a fixed order of summation, and exact counters of what is sent.

What carries them is chosen by the group and by the tensors' device (`host_transport`, `device_transport`); a watchdog
and an observer are wrapped around that (`instrumentation`). Here is what does not depend on any of these: what is
counted, and that a rank alone sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.device_transport import DeviceCollectives
from zero_strategy.comm.host_transport import HostCollectives
from zero_strategy.comm.instrumentation import Instrumentation, PendingWork
from zero_strategy.comm.process_group import end_with
from zero_strategy.comm.transport import Collectives, Job, Scattered
from zero_strategy.runtime.observer import Observed
from zero_strategy.watchdog.flight_recorder import CollectiveLog, Subject

if TYPE_CHECKING:
    from zero_strategy.watchdog.watchdog import Watchdog


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

    Attributes:
        closed: After `close`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, counters: CommunicationCounters, *, owns: bool = False
    ) -> None:
        self.group, self.counters = group, counters
        self._host, self._device = HostCollectives(group), DeviceCollectives(group)
        self.rank, self.size = self._host.rank, self._host.size
        self._control: Collectives = self._host if self.on_host else self._device
        self._instrumentation = Instrumentation()
        self.closed = False
        # With the transport, not with this object: what is under way holds the transport.
        self._end = end_with(self._host, group) if owns and group is not None else None

    def close(self) -> None:
        """Let go of threads, buffers and the process group, which its maker ends. Later collectives raise."""
        self.closed = True
        if self._end is not None:
            self._end.detach()
        self.group = None
        self._instrumentation.close()
        self._host.close()
        self._device.close()

    @property
    def on_host(self) -> bool:
        """True if the ranks can exchange what is in host memory."""
        return self._host.available

    @property
    def track(self) -> CollectiveLog | None:
        """By which a watchdog watches; None: no watchdog does."""
        return self._instrumentation.track

    @track.setter
    def track(self, track: CollectiveLog | None) -> None:
        self._instrumentation.track = track

    @property
    def observed(self) -> Observed:
        """The observers; a mesh has one object for all of its communicators."""
        return self._instrumentation.observed

    @observed.setter
    def observed(self, observed: Observed) -> None:
        self._instrumentation.observed = observed

    def guarded(self, watchdog: Watchdog, name: str, twin: dist.ProcessGroup | None = None) -> None:
        """Let a watchdog watch these collectives.

        Args:
            watchdog: Of the engine.
            name: Tells groups of the same ranks apart; equal on all of them.
            twin: The same ranks on the host, for a strict watchdog's own messages, where the group is of a GPU's.
        """
        if self.group is None or self.size == 1 or self.track is not None:
            return
        ranks = dist.get_process_group_ranks(self.group)
        self.track = watchdog.track(name, ranks, self.abort)
        if watchdog.strict:
            comparing = HostCollectives(twin or self.group)
            if twin is not None:
                end_with(comparing, twin)
            self._instrumentation.exchange_card = comparing.exchange_card

    def abort(self) -> None:
        """Break this rank's connections, so that every wait for them ends."""
        self._host.abort()
        self._device.abort()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept from one exchange to the next."""
        return self._host.buffer_bytes

    def all_gather(self, flat: Tensor, first: Callable[[], None] | None = None, of: Subject = "") -> PendingWork:
        """Fill `flat` (size x n elements) in place from every rank's own n-element slice.

        Args:
            flat: The buffer.
            first: Puts this rank's slice there; runs in the background too, where collectives do.
            of: What is gathered, for the watchdog's reports.
        """
        if self.size == 1 or flat.numel() == 0:
            return self._instrumentation.pending("fetch", [] if first is None else [self._host.start(first)])
        carrier = self._carrier(flat)
        return self._start("all_gather", of, flat, carrier, carrier.all_gather(flat), first)

    def reduce_scatter(
        self, flat: Tensor, of: Subject = "", factor: float = 1.0, into: Tensor | None = None
    ) -> PendingWork:
        """Sum `flat` over the ranks; the rank's own slice of `flat`, or `into`, holds its part of the sum afterwards.

        The other slices keep the local values. On gloo the sum is taken in rank order.

        Args:
            flat: The buffer; size x n elements.
            of: What is reduced, for the watchdog's reports.
            factor: The whole sum is multiplied by it.
            into: Takes this rank's part; n elements.
        """
        if flat.numel() == 0:
            return PendingWork([])
        if self.size == 1:
            total = flat if into is None else into.copy_(flat)
            if factor != 1.0:
                total.mul_(factor)
            return PendingWork([])
        carrier = self._carrier(flat)
        return self._start("reduce_scatter", of, flat, carrier, carrier.reduce_scatter(flat, into, factor))

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """True if `reduce_scatter_scattered` is there for so many elements. Ranks may differ in what they use."""
        return self._host.takes_scattered(numel, dtype)

    def reduce_scatter_scattered(
        self, source: Scattered, into: Tensor, of: Subject = "", factor: float = 1.0
    ) -> PendingWork:
        """As `reduce_scatter` of a flat buffer, from where its parts lie, and to all peers alike.

        Args:
            source: The parts, of size x n elements; nobody changes them before the end.
            into: Takes this rank's part of the sum; n elements.
            of: What is reduced, for the watchdog's reports.
            factor: The whole sum is multiplied by it.
        """
        job = self._host.reduce_scatter_scattered(source, into, factor)
        return self._start("reduce_scatter", of, source, self._host, job)

    def all_reduce(self, flat: Tensor, of: Subject = "") -> None:
        """Sum `flat` over the ranks in place, in rank order. `flat.numel()` is a multiple of the group's size."""
        self.reduce_scatter(flat, of).wait()
        self.all_gather(flat, of=of).wait()

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

    def all_to_all(self, outgoing: list[Tensor], of: Subject = "") -> list[Tensor]:
        """Exchange tensors with all ranks: outgoing[r] goes to rank r; returns those sent here, in rank order.

        On the CPU, contiguous; all tensors of all ranks have one shape and dtype.
        """
        if self.size == 1:
            return outgoing
        own = outgoing[self.rank]
        self._count("control", own)
        with self._instrumentation.begin_here("all_to_all", of, own) as watched:
            self._instrumentation.compare(watched)
            return self._host.all_to_all(outgoing)

    def all_gather_objects(self, value: Any, of: Subject = "") -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        with self._instrumentation.begin_here("all_gather_objects", of) as watched, self.observed.span("control"):
            self._instrumentation.compare(watched)
            return self._control.all_gather_objects(value)

    def _carrier(self, tensor: Tensor) -> Collectives:
        """The transport for such a tensor: one group may have connections for either kind of device."""
        return self._host if tensor.is_cpu else self._device

    def _start(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        of: Subject,
        flat: Tensor | Scattered,
        carrier: Collectives,
        job: Job,
        first: Callable[[], None] | None = None,
    ) -> PendingWork:
        """Begin a collective in which every other rank gets one slice of as many as there are ranks."""
        instrumentation, itemsize = self._instrumentation, flat.dtype.itemsize
        numel = flat.nbytes // itemsize // self.size * (self.size - 1)
        self.counters.add(kind, numel, itemsize)
        watched = instrumentation.begin(kind, of, flat)
        fetched = None if first is None else carrier.start(first)
        started = carrier.start(instrumentation.around(job.run, kind, numel * itemsize, watched, flat.device))
        works = [work for work in (fetched, started) if work is not None]
        return instrumentation.pending(kind, works, watched, job.then)

    def _count(self, kind: str, tensor: Tensor) -> int:
        """Count what goes to every other rank as it is; returns the bytes."""
        numel, itemsize = tensor.numel() * (self.size - 1), tensor.element_size()
        self.counters.add(kind, numel, itemsize)
        return numel * itemsize
