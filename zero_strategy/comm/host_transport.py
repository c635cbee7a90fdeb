"""Collectives on tensors of the host, built from exchanges of slices, with sums in rank order.

Gloo's own all-gather and reduce-scatter are two to four times slower than point-to-point exchange of the same slices,
so they are built from it: every rank sends each slice straight to the rank that needs it, through memory that
they share where they are on one host (`shared_memory`). Sums are taken in
rank order, ((g0 + g1) + g2) + ..., so that a result does not depend on the stage or on who computes it.

Exchanges block their caller, so jobs run in a thread of their own, one after the other (`background`).
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm import sealed
from zero_strategy.comm.shared_memory import LEAST_BYTES, SharedMemoryExchange
from zero_strategy.comm.transport import Collectives, Job, Run, Scattered, TensorMessage, transport_errors
from zero_strategy.runtime.torch_private import backend_of, timeout_of
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.flight_recorder import TransportError

_MOST_DIRECT = 8
"""Ranks among which small messages go straight from each to each."""


class HostCollectives(Collectives):
    """See `Collectives`; on tensors of the CPU."""

    device = "cpu"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._worker = BackgroundWorker(interrupt=self.abort)
        self._buffers: dict[int, Tensor] = {}
        self._shared: SharedMemoryExchange | None = None

    def start(self, run: Run) -> Future[None]:
        """Queue it for the thread."""
        return self._worker.submit(run)

    def close(self) -> None:
        """See `Collectives`."""
        super().close()
        self._worker, self._shared = BackgroundWorker(), None
        self._buffers.clear()

    def abort(self) -> None:
        """See `Collectives`."""
        if self._shared is not None:
            self._shared.abort()
        super().abort()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept from one exchange to the next."""
        shared = 0 if self._shared is None else self._shared.nbytes
        return shared + sum(buffer.numel() for buffer in self._buffers.values())

    def all_gather(self, flat: Tensor) -> Job:
        """See `Collectives`."""
        slices = list(flat.chunk(self.size))
        return Job(partial(self.exchange, [slices[self.rank]] * self.size, slices))

    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float) -> Job:
        """See `Collectives`."""
        slices = list(flat.chunk(self.size))
        total = slices[self.rank] if into is None else into
        return Job(partial(self._sum_in_rank_order, slices, total, factor))

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """True if `reduce_scatter_scattered` is there for so many elements. Ranks may differ in what they use."""
        shared, nbytes = self._shared, numel // self.size * dtype.itemsize
        return shared is not None and shared.available and nbytes >= LEAST_BYTES

    def reduce_scatter_scattered(self, source: Scattered, into: Tensor, factor: float) -> Job:
        """As `reduce_scatter` of a flat buffer, from where its parts lie."""
        return Job(partial(self._sum_scattered, source, into, factor))

    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """See `Collectives`."""
        values = self._room_for_all(value)
        if self.size <= _MOST_DIRECT:
            self.exchange([value] * self.size, values)
        else:
            with transport_errors():
                dist.all_gather(values, value.clone(), group=self.group)
        return values

    def exchange_card(self, card: Tensor) -> list[Tensor]:
        """The same, by gloo's messages alone, so that no memory is shared for it."""
        cards = self._room_for_all(card)
        self._exchange_by_gloo([card] * self.size, cards)
        return cards

    def all_gather_objects(self, value: Any) -> list[Any]:
        """See `Collectives`."""
        assert self.group is not None
        with transport_errors():
            return sealed.all_gather_objects(value, self.group, torch.device("cpu"))

    def all_to_all(self, outgoing: list[Tensor]) -> list[Tensor]:
        """Exchange tensors of one shape and dtype with all ranks; returns those sent here, in rank order."""
        incoming = self._room_for_all(outgoing[self.rank])
        sent = [tensor.view(torch.uint8) for tensor in outgoing]  # gloo does not know all dtypes
        self.exchange(sent, [tensor.view(torch.uint8) for tensor in incoming])
        return incoming

    def exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send outgoing[r] to each other rank r while incoming[r] arrives from it; all have the same bytes."""
        if (shared := self._shared_memory(outgoing[self.rank])) is not None:
            shared(outgoing, incoming)
        else:
            self._exchange_by_gloo(outgoing, incoming)

    def _room_for_all(self, own: Tensor) -> list[Tensor]:
        """By rank: this one's value, and room for each of the others'."""
        return [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]

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

    def _shared_memory(self, message: Tensor) -> SharedMemoryExchange | None:
        """The shared memory for large messages, if all ranks share a host."""
        if message.numel() * message.element_size() < LEAST_BYTES:
            return None
        if self._shared is None:
            self._shared = SharedMemoryExchange(self.rank, self.size, self._exchange_by_gloo, self._timeout())
        return self._shared if self._shared.available else None

    def _timeout(self) -> float:
        """Seconds, as the group was made with."""
        assert self.group is not None
        return timeout_of(backend_of(self.group, self.device))

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
