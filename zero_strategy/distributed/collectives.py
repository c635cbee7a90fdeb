"""Collectives on whole buckets, in place, with a fixed order of summation.

Gloo's own all-gather and reduce-scatter are two to four times slower than point-to-point exchange of the same slices,
so on gloo they are built from it: every rank sends each slice straight to the rank that needs it, through memory that
they share where they are on one host (`shared_memory`). Sums are taken in
rank order, ((g0 + g1) + g2) + ..., so that a result does not depend on the stage or on who computes it.
NCCL brings its own; its order of summation is NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.distributed.background import BackgroundWorker
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.shared_memory import LEAST_BYTES, SharedMemoryExchange
from zero_strategy.observing import Observed, Span, Transfer

_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class PendingWork:
    """A collective under way. `wait()` may be called any number of times; the first call finishes it.

    Args:
        works: What has to end, in order.
        observed: Who is told of waits.
        kinds: What each of the works is.
    """

    def __init__(self, works: Sequence[Any], observed: Observed | None = None, kinds: Sequence[Span] = ()) -> None:
        self._works = list(works)
        self._observed, self._kinds = observed, kinds

    def wait(self) -> None:
        """Block until the result is in place (on a GPU: until the current stream will see it)."""
        works, self._works = self._works, []
        if self._observed is None or self._observed.observer is None:
            for work in works:
                _finish(work)
            return
        for kind, work in zip(self._kinds, works, strict=True):
            with self._observed.span(kind):
                _finish(work)


class _Watched:
    """Work of a device's own, whose end is when somebody waits for it."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        self._work.wait()
        self._ended()


def _finish(work: Any) -> None:
    if isinstance(work, Future):
        work.result()
    else:
        work.wait()


class Communicator:
    """Collectives of one group of ranks, on tensors of the CPU (gloo) or of a GPU (NCCL).

    Args:
        group: The process group, or None for a group of this rank alone.
        counters: Where what is sent gets counted.

    Attributes:
        observed: Who is told what it does; a mesh has one for all of its communicators.
    """

    def __init__(self, group: dist.ProcessGroup | None, counters: CommunicationCounters) -> None:
        self.group, self.counters = group, counters
        self.observed = Observed()
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self._worker = BackgroundWorker()
        self._buffers: dict[int, Tensor] = {}
        self._shared: SharedMemoryExchange | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept from one exchange to the next."""
        shared = 0 if self._shared is None else self._shared.nbytes
        return shared + sum(buffer.numel() for buffer in self._buffers.values())

    def all_gather(self, flat: Tensor, first: Callable[[], None] | None = None) -> PendingWork:
        """Fill `flat` (size x n elements) in place from every rank's own n-element slice.

        Args:
            flat: The buffer.
            first: Puts this rank's slice there; runs in the background too, where collectives do.
        """
        if self.size == 1 or flat.numel() == 0:
            return self._pending("fetch", [] if first is None else [self._worker.submit(first)])
        slices = list(flat.chunk(self.size))
        own = slices[self.rank]
        self.counters.add("all_gather", own.numel() * (self.size - 1), own.element_size())
        if flat.device.type != "cpu":
            if first is not None:
                first()
            work = _native_all_gather(flat, own, group=self.group, async_op=True)
            return self._pending("all_gather", [self._watched("all_gather", own, work)])
        read = [] if first is None else [self._worker.submit(first)]
        exchange = partial(self._exchange, [own] * self.size, slices)
        return self._pending("all_gather", [*read, self._worker.submit(self._told("all_gather", own, exchange))])

    def reduce_scatter(self, flat: Tensor) -> PendingWork:
        """Sum `flat` over the ranks; the rank's own slice of `flat` holds its part of the sum afterwards.

        The other slices keep the local values. On gloo the sum is taken in rank order.
        """
        if self.size == 1 or flat.numel() == 0:
            return PendingWork([])
        slices = list(flat.chunk(self.size))
        own = slices[self.rank]
        self.counters.add("reduce_scatter", own.numel() * (self.size - 1), own.element_size())
        if flat.device.type != "cpu":
            work = _native_reduce_scatter(own, flat, group=self.group, async_op=True)
            return self._pending("reduce_scatter", [self._watched("reduce_scatter", own, work)])
        add_up = partial(self._sum_in_rank_order, slices)
        return self._pending("reduce_scatter", [self._worker.submit(self._told("reduce_scatter", own, add_up))])

    def _pending(self, kind: Span, works: Sequence[Any]) -> PendingWork:
        """Works of which the last is of this kind; one before it brings the own slice."""
        return PendingWork(works, self.observed, ("fetch", kind)[2 - len(works) :])

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

    def _watched(self, kind: Transfer, own: Tensor, work: Any) -> Any:
        ended = self.observed.transfer(kind, self._sent_bytes(own))
        return work if ended is None else _Watched(work, ended)

    def _sent_bytes(self, own: Tensor) -> int:
        """Of an exchange in which every other rank gets as much as `own` has."""
        return own.numel() * own.element_size() * (self.size - 1)

    def _sum_in_rank_order(self, slices: list[Tensor]) -> None:
        own = slices[self.rank]
        if (shared := self._shared_memory(own)) is not None:
            for one in shared.rounds(slices):
                mine = own.view(torch.uint8)[one.start : one.stop].view(own.dtype)
                others = {peer: part.view(own.dtype) for peer, part in one.parts.items()}
                self._add_up(others, mine, one.spare.view(own.dtype))
            return
        arrived = {rank: self._arrivals(rank, own) for rank in range(self.size) if rank != self.rank}
        self._exchange_by_gloo(slices, [arrived.get(rank, own) for rank in range(self.size)])
        self._add_up(arrived, own, self._arrivals(self.rank, own) if self.rank > 1 else own)

    def _add_up(self, others: dict[int, Tensor], own: Tensor, spare: Tensor) -> None:
        """Own becomes the sum of all, in rank order; `spare` is memory of its size."""
        parts = {**others, self.rank: own}
        if self.rank > 1:  # its own part must stay readable until its turn in the sum comes
            parts[self.rank] = spare.copy_(own)
        torch.add(parts[0], parts[1], out=own)
        for rank in range(2, self.size):
            own.add_(parts[rank])

    def _arrivals(self, rank: int, like: Tensor) -> Tensor:
        """A buffer for a slice from `rank`, used again for the next one: exchanges run one at a time."""
        needed = like.numel() * like.element_size()
        buffer = self._buffers.get(rank)
        if buffer is None or buffer.numel() < needed:
            self._buffers[rank] = buffer = torch.empty(needed, dtype=torch.uint8)
        return buffer[:needed].view(like.dtype)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over the ranks in place, in rank order. `flat.numel()` is a multiple of the group's size."""
        self.reduce_scatter(flat).wait()
        self.all_gather(flat).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor` from group rank `source` to all ranks, in place."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self.rank == source:
            self.counters.add("broadcast", tensor.numel() * (self.size - 1), tensor.element_size())
        sent = self._sent_bytes(tensor) if self.rank == source else 0
        with self.observed.span("broadcast", nbytes=sent):
            # As bytes: gloo knows neither bool nor int16, float8 and complex.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    def exchange_small(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order. For flags and norms."""
        if self.size == 1:
            return [value]
        self.counters.add("control", value.numel() * (self.size - 1), value.element_size())
        values = [value if rank == self.rank else torch.empty_like(value) for rank in range(self.size)]
        with self.observed.span("control", nbytes=self._sent_bytes(value)):
            if self.size <= 8:
                self._exchange([value] * self.size, values)
            else:
                dist.all_gather(values, value.clone(), group=self.group)
        return values

    def all_to_all(self, outgoing: list[Tensor]) -> list[Tensor]:
        """What every rank has sent to this one, in rank order; outgoing[r] goes to rank r.

        On the CPU, contiguous; all tensors of all ranks have one shape and dtype.
        """
        if self.size == 1:
            return outgoing
        own = outgoing[self.rank]
        self.counters.add("control", own.numel() * (self.size - 1), own.element_size())
        incoming = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        sent = [tensor.view(torch.uint8) for tensor in outgoing]  # gloo does not know all dtypes
        self._exchange(sent, [tensor.view(torch.uint8) for tensor in incoming])
        return incoming

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.observed.span("control"):
            dist.all_gather_object(values, value, group=self.group)
        return values

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
            self._shared = SharedMemoryExchange(self.rank, self.size, self._exchange_by_gloo)
        return self._shared if self._shared.available else None

    def _exchange_by_gloo(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        works = []
        for step in range(1, self.size):
            target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works.append(dist.irecv(incoming[source], group=self.group, group_src=source))
            works.append(dist.isend(outgoing[target], group=self.group, group_dst=target))
        for work in works:
            assert work is not None  # every rank is a member
            work.wait()
