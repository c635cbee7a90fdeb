"""Collectives on whole buckets, in place, with a fixed order of summation, and counters of what is sent.

exact, so that tests can compare them with formulas.

Gloo's own all-gather and reduce-scatter are two to four times slower than point-to-point exchange of the same slices,
so on gloo they are built from it: every rank sends each slice straight to the rank that needs it, through memory that
they share where they are on one host (`shared_memory`). Sums are taken in
rank order, ((g0 + g1) + g2) + ..., so that a result does not depend on the stage or on who computes it.
NCCL brings its own; its order of summation is NCCL's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm import sealed
from zero_strategy.comm.pending import ObservedWork, PendingWork, Scattered, transport
from zero_strategy.comm.process_group import end_with
from zero_strategy.comm.shared_memory import LEAST_BYTES, SharedMemoryExchange, TensorMessage, decode_card, encode_card
from zero_strategy.runtime.observer import Observed, Span, Transfer
from zero_strategy.runtime.torch_private import backend_of, timeout_of
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.flight_recorder import CollectiveLog, CollectiveRecord, Subject, TransportError
from zero_strategy.watchdog.waits import Group

if TYPE_CHECKING:
    from zero_strategy.watchdog.watchdog import Watchdog


@dataclass
class CommunicationCounters:
    """What this rank sent since the last `reset`.

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

_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


_UNWATCHED = nullcontext()


class Communicator:
    """Collectives of one group of ranks, on tensors of the CPU (gloo) or of a GPU (NCCL).

    Args:
        group: The process group, or None for a group of this rank alone.
        counters: Where what is sent gets counted.
        owns: The group ends when this object is garbage, unless it was closed (then whoever closes ends it).

    Attributes:
        track: By which a watchdog watches.
        closed: After `close`.
        observed: Who is told what it does; a mesh has one for all of its communicators.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, counters: CommunicationCounters, *, owns: bool = False
    ) -> None:
        self.group, self.counters = group, counters
        self.observed = Observed()
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self._worker = BackgroundWorker(interrupt=self.abort)
        self._buffers: dict[int, Tensor] = {}
        self._shared: SharedMemoryExchange | None = None
        self.track: CollectiveLog | None = None
        self._comparing: Communicator | None = None
        self.closed = False
        self._end = end_with(self, group) if owns and group is not None else None

    def close(self) -> None:
        """Let go of threads, buffers and the process group, which its maker ends. Later collectives raise."""
        self.closed = True
        if self._end is not None:
            self._end.detach()
        self.group = self.track = self._comparing = self._shared = None
        self._worker = BackgroundWorker()
        self._buffers.clear()

    @property
    def on_host(self) -> bool:
        """Whether the ranks can exchange what is in host memory."""
        if self.group is None:
            return True
        try:
            return backend_of(self.group, "cpu") is not None
        except RuntimeError:
            return False

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
            self._comparing = Communicator(twin or self.group, CommunicationCounters(), owns=twin is not None)

    def abort(self) -> None:
        """Break this rank's connections, so that every wait for them ends."""
        if self._shared is not None:
            self._shared.abort()
        if self.group is not None:
            for device in ("cpu", "cuda"):
                with suppress(RuntimeError):  # this group has nothing for such a device
                    backend = backend_of(self.group, device)
                    Group(backend, list(range(self.size))).abort()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept from one exchange to the next."""
        shared = 0 if self._shared is None else self._shared.nbytes
        return shared + sum(buffer.numel() for buffer in self._buffers.values())

    def all_gather(self, flat: Tensor, first: Callable[[], None] | None = None, of: Subject = "") -> PendingWork:
        """Fill `flat` (size x n elements) in place from every rank's own n-element slice.

        Args:
            flat: The buffer.
            first: Puts this rank's slice there; runs in the background too, where collectives do.
            of: What is gathered, for the watchdog's reports.
        """
        if self.size == 1 or flat.numel() == 0:
            return self._pending("fetch", [] if first is None else [self._worker.submit(first)])
        slices = list(flat.chunk(self.size))
        own = slices[self.rank]
        self.counters.add("all_gather", own.numel() * (self.size - 1), own.element_size())
        watched = self._begin("all_gather", of, flat)
        if flat.device.type != "cpu":
            if first is not None:
                first()
            return self._native("all_gather", own, watched, partial(_native_all_gather, flat, own))
        read = [] if first is None else [self._worker.submit(first)]
        exchange = self._told("all_gather", own, partial(self._exchange, [own] * self.size, slices))
        return self._pending("all_gather", [*read, self._submit(watched, exchange)], watched)

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
        slices = list(flat.chunk(self.size))
        own = slices[self.rank]
        total = own if into is None else into
        if self.size == 1:
            total.copy_(own)
            if factor != 1.0:
                total.mul_(factor)
            return PendingWork([])
        self.counters.add("reduce_scatter", own.numel() * (self.size - 1), own.element_size())
        watched = self._begin("reduce_scatter", of, flat)
        if flat.device.type != "cpu":
            scale = None if factor == 1.0 else partial(total.mul_, factor)
            return self._native("reduce_scatter", own, watched, partial(_native_reduce_scatter, total, flat), scale)
        add_up = self._told("reduce_scatter", own, partial(self._sum_in_rank_order, slices, total, factor))
        return self._pending("reduce_scatter", [self._submit(watched, add_up)], watched)

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether `reduce_scatter_scattered` is there for so many elements. Ranks may differ in what they use."""
        shared, nbytes = self._shared, numel // self.size * dtype.itemsize
        return shared is not None and shared.available and nbytes >= LEAST_BYTES

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
        self.counters.add("reduce_scatter", into.numel() * (self.size - 1), into.element_size())
        watched = self._begin("reduce_scatter", of, source)
        add_up = self._told("reduce_scatter", into, partial(self._sum_scattered, source, into, factor))
        return self._pending("reduce_scatter", [self._submit(watched, add_up)], watched)

    def _sum_scattered(self, source: Scattered, into: Tensor, factor: float) -> None:
        assert self._shared is not None
        count, size = into.numel(), into.element_size()
        outgoing = [source.slice(rank * count, (rank + 1) * count) for rank in range(self.size)]
        for one in self._shared.rounds(outgoing):
            first, stop = one.start // size, one.stop // size
            others = {peer: part.view(into.dtype) for peer, part in one.parts.items()}
            for low, high, values in outgoing[self.rank].parts(first, stop):
                own = into.new_zeros(high - low) if values is None else values
                there = {peer: part[low - first : high - first] for peer, part in others.items()}
                self._add_up(there, own, into[low:high], factor, None)

    def _pending(
        self,
        kind: Span,
        works: Sequence[Any],
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
    ) -> PendingWork:
        """Works of which the last is of this kind; one before it brings the own slice."""
        return PendingWork(works, self.observed, ("fetch", kind)[2 - len(works) :], watched, then)

    def _told(self, kind: Transfer, own: Tensor, job: Callable[[], None]) -> Callable[[], None]:
        """A job for the worker; whoever observes hears when it begins and ends."""
        if self.observed.observer is None:
            return job

        def told() -> None:
            ended = self.observed.transfer(kind, self._sent_bytes(own))
            job()
            if ended is not None:
                ended()

        return told

    def _sent_bytes(self, own: Tensor) -> int:
        """Of an exchange in which every other rank gets as much as `own` has."""
        return own.numel() * own.element_size() * (self.size - 1)

    def _begin(self, kind: str, of: Subject, tensor: Tensor | Scattered | None = None) -> CollectiveRecord | None:
        if self.track is None:
            if self.closed:
                raise RuntimeError(f"{kind} after the engine was closed; make a new engine")
            return None
        if tensor is None:
            return self.track.begin(kind, of)
        return self.track.begin(kind, of, tensor.nbytes, tensor.dtype)

    def _begin_here(self, kind: str, of: Subject, tensor: Tensor | None = None) -> AbstractContextManager[Any]:
        """The same of one that this thread waits for now."""
        return self._begin(kind, of, tensor) or _UNWATCHED

    def _submit(self, watched: CollectiveRecord | None, job: Callable[[], None]) -> Future[None]:
        """Queue a collective; a strict watchdog compares it first."""
        if self._comparing is not None and watched is not None:
            return self._worker.submit(partial(self._compared, watched, job))
        return self._worker.submit(job)

    def _native(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        own: Tensor,
        watched: CollectiveRecord | None,
        start: Callable[..., Any],
        then: Callable[[], object] | None = None,
    ) -> PendingWork:
        self._compare(watched)
        work = start(group=self.group, async_op=True)
        if watched is not None:
            watched.track.under_way(watched, work, own.device)
        ended = self.observed.transfer(kind, self._sent_bytes(own))
        return self._pending(kind, [work if ended is None else ObservedWork(work, ended)], watched, then)

    def _compared(self, watched: CollectiveRecord, job: Callable[[], None]) -> None:
        self._compare(watched)
        job()

    def _compare(self, watched: CollectiveRecord | None) -> None:
        if self._comparing is not None and watched is not None:
            own = encode_card(watched.text())
            cards = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
            self._comparing._exchange_by_gloo([own] * self.size, cards)
            watched.compare([decode_card(card) for card in cards])

    def _sum_in_rank_order(self, slices: list[Tensor], total: Tensor, factor: float) -> None:
        own, in_place = slices[self.rank], total is slices[self.rank]
        if (shared := self._shared_memory(own)) is not None:
            for one in shared.rounds([TensorMessage(each) for each in slices]):
                mine, sums = (tensor.view(torch.uint8)[one.start : one.stop].view(own.dtype) for tensor in (own, total))
                others = {peer: part.view(own.dtype) for peer, part in one.parts.items()}
                spare = one.spare.view(own.dtype) if in_place else None
                self._add_up(others, mine, sums, factor, spare)
            return
        arrived = {rank: self._arrivals(rank, own) for rank in range(self.size) if rank != self.rank}
        self._exchange_by_gloo(slices, [arrived.get(rank, own) for rank in range(self.size)])
        if in_place and self.rank > 1:  # what is summed up is not yet its own
            self._add_up(arrived, own, arrived[0], factor, None)
            own.copy_(arrived[0])
        else:
            self._add_up(arrived, own, total, factor, None)

    def _add_up(
        self, others: dict[int, Tensor], own: Tensor, total: Tensor, factor: float, spare: Tensor | None
    ) -> None:
        """Total becomes the sum of all, in rank order, times the factor.

        It may be the first part; if it is this rank's own, `spare` is memory of its size, where that is set aside.
        """
        parts = {**others, self.rank: own}
        if spare is not None and self.rank > 1:  # until its turn in the sum comes
            parts[self.rank] = spare.copy_(own)
        torch.add(parts[0], parts[1], out=total)
        for rank in range(2, self.size):
            total.add_(parts[rank])
        if factor != 1.0:
            total.mul_(factor)

    def _arrivals(self, rank: int, like: Tensor) -> Tensor:
        """A buffer for a slice from `rank`, used again for the next one: exchanges run one at a time."""
        needed = like.numel() * like.element_size()
        buffer = self._buffers.get(rank)
        if buffer is None or buffer.numel() < needed:
            self._buffers[rank] = buffer = torch.empty(needed, dtype=torch.uint8)
        return buffer[:needed].view(like.dtype)

    def all_reduce(self, flat: Tensor, of: Subject = "") -> None:
        """Sum `flat` over the ranks in place, in rank order. `flat.numel()` is a multiple of the group's size."""
        self.reduce_scatter(flat, of).wait()
        self.all_gather(flat, of=of).wait()

    def broadcast(self, tensor: Tensor, source: int, of: Subject = "") -> None:
        """Copy `tensor` from group rank `source` to all ranks, in place."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.rank == source:
            self.counters.add("broadcast", tensor.numel() * (self.size - 1), tensor.element_size())
        sent, span = self._sent_bytes(tensor) if self.rank == source else 0, self.observed.span
        with self._begin_here("broadcast", of, tensor) as watched, transport(), span("broadcast", nbytes=sent):
            self._compare(watched)
            # As bytes: gloo knows neither bool nor int16, float8 and complex.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    def all_gather_small(self, value: Tensor, of: Subject = "") -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order. For flags and norms."""
        if self.size == 1:
            return [value]
        self.counters.add("control", value.numel() * (self.size - 1), value.element_size())
        values = [value if rank == self.rank else torch.empty_like(value) for rank in range(self.size)]
        span = self.observed.span("control", nbytes=self._sent_bytes(value))
        with self._begin_here("exchange", of, value) as watched, span:
            self._compare(watched)
            if self.size <= 8:
                self._exchange([value] * self.size, values)
            else:
                with transport():
                    dist.all_gather(values, value.clone(), group=self.group)
        return values

    def all_to_all(self, outgoing: list[Tensor], of: Subject = "") -> list[Tensor]:
        """What every rank has sent to this one, in rank order; outgoing[r] goes to rank r.

        On the CPU, contiguous; all tensors of all ranks have one shape and dtype.
        """
        if self.size == 1:
            return outgoing
        own = outgoing[self.rank]
        self.counters.add("control", own.numel() * (self.size - 1), own.element_size())
        incoming = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        sent = [tensor.view(torch.uint8) for tensor in outgoing]  # gloo does not know all dtypes
        with self._begin_here("all_to_all", of, own) as watched:
            self._compare(watched)
            self._exchange(sent, [tensor.view(torch.uint8) for tensor in incoming])
        return incoming

    def all_gather_objects(self, value: Any, of: Subject = "") -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        assert self.group is not None
        with self._begin_here("all_gather_objects", of) as watched, transport(), self.observed.span("control"):
            self._compare(watched)
            device = torch.device("cpu" if self.on_host else "cuda")
            return sealed.all_gather_objects(value, self.group, device)

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send outgoing[r] to each other rank r while incoming[r] arrives from it; all have the same bytes."""
        if (shared := self._shared_memory(outgoing[self.rank])) is not None:
            shared(outgoing, incoming)
        else:
            self._exchange_by_gloo(outgoing, incoming)

    def _shared_memory(self, message: Tensor) -> SharedMemoryExchange | None:
        """What large messages go through where all ranks share a host."""
        if message.numel() * message.element_size() < LEAST_BYTES:
            return None
        if self._shared is None:
            self._shared = SharedMemoryExchange(self.rank, self.size, self._exchange_by_gloo, self._timeout())
        return self._shared if self._shared.available else None

    def _timeout(self) -> float:
        """Seconds, as the group was made with."""
        assert self.group is not None
        return timeout_of(backend_of(self.group, "cpu"))

    def _exchange_by_gloo(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        # Messages of other lengths are kept apart: gloo ends the process that receives more than it asked for.
        works, tag = [], 1 + outgoing[self.rank].numel() * outgoing[self.rank].element_size() % (1 << 30)
        try:
            for step in range(1, self.size):
                target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                works.append(dist.irecv(incoming[source], group=self.group, group_src=source, tag=tag))
                works.append(dist.isend(outgoing[target], group=self.group, group_dst=target, tag=tag))
            for work in works:
                assert work is not None  # every rank is a member
                work.wait()
        except RuntimeError as error:
            raise TransportError(str(error)) from error
