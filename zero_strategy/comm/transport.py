"""The transport of one group: its collectives on tensors of the host (gloo, shared memory) and of a GPU (NCCL).

The contract, for either kind of device:

- *Into place.* Results land in the tensors that were given: a gather fills all slices of `flat` but this rank's own,
  which is there before; a reduction leaves all of `flat` but its result as it was.
- *Order of summation.* It depends on nothing but the group: the same values give the same bits at every stage and in
  every run. On the host it is the order of ranks; on a device it is that of its library.
- *Who waits.* A gather and a reduction are jobs, which somebody else has wrapped before they start. `start` never waits
  for other ranks; whoever needs the result waits for what it returns, and calls the job's `then`. All other methods
  return when they are done.
- *Who counts and watches.* Not the transport: see `collectives`.
- *Errors.* A connection that breaks is a `TransportError`.

On the host. Gloo's own all-gather and reduce-scatter are two to four times slower than point-to-point exchange of the
same slices, so they are built from it: every rank sends each slice straight to the rank that needs it, through memory
that they share where they are on one host (`shared_memory`). Sums are taken in rank order, ((g0 + g1) + g2) + ..., so
that a result does not depend on the stage or on who computes it. Exchanges block their caller, so jobs run in a thread
of their own, one after the other (`worker`).

On a device its own library works in place, without holding the caller. Its streams are ordered against the current one
by `torch.distributed` itself: what was put into a buffer before is seen, and a wait makes the current stream wait, not
the host. The order of summation is the library's.

Objects. The connections of ranks that a command has started listen on the loopback, where another user of the host may
connect. So what comes over them is unpickled only where a MAC (HMAC-SHA256, RFC 2104) shows that one of these ranks has
sent it. The key comes with the environment, which other users cannot read.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.process_group import MOST_DIRECT
from zero_strategy.comm.shared_memory import (
    LEAST_BYTES,
    Scattered,
    SharedMemoryExchange,
    TensorMessage,
)
from zero_strategy.runtime.compute_device import gpu_of_group, on
from zero_strategy.runtime.torch_private import backend_of, timeout_of
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.flight_recorder import TransportError
from zero_strategy.watchdog.waits import Group


class Work(Protocol):
    """Work that a device has under way."""

    def wait(self) -> object:
        """Let the current stream see its result."""

    def is_completed(self) -> bool:
        """True if it is over, on the device."""


class Fetch(Work, Protocol):
    """The own slice on its way to the device, beside what it computes."""

    def after(self) -> AbstractContextManager[object]:
        """Inside, what is queued on the device comes after it, and what is computed need not wait for it."""


Run = Callable[[], "Work | None"]
"""Carries something out; returns None when it is done, or what the device has under way."""
Started = Future[None] | Work
"""What can be waited for."""


class Job(NamedTuple):
    """A collective that has not begun.

    Attributes:
        run: Carries it out; called by `start`, alone or by what is wrapped around it.
        then: Called once by whoever has waited for its end; None: nothing is left to do.
    """

    run: Run
    then: Callable[[], object] | None = None


class Order(Protocol):
    """An order of summation over ranks other than theirs; see `reproducible.slot_tree.SumOrder`."""

    @property
    def results(self) -> Sequence[object]:
        """The sums that come out."""

    def add_up(self, parts: Sequence[Tensor], into: Sequence[Tensor], factor: float = 1.0) -> None:
        """Write them, times a factor, into memory other than that of the parts, which are by rank and only read."""


class Collectives(ABC):
    """Collectives of one group, on tensors of one kind of device.

    Args:
        group: The process group, or None for this rank alone.

    Attributes:
        device: Kind of the device.
        rank, size: This rank in the group, and the group's size.
        available: The group has connections for such tensors. This rank alone needs none.
    """

    device: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.available = group is None or _carries(group, self.device)

    @abstractmethod
    def start(self, run: Run) -> Started | None:
        """Begin what is run in the order of these calls, the same on all ranks; None: it is done."""

    @abstractmethod
    def all_gather(self, flat: Tensor) -> Job:
        """Fill `flat` (size x n elements) from every rank's own slice of it."""

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float, order: Order | None = None) -> Job:
        """Sum `flat` (size x n elements) over the ranks and multiply it, for this rank its own slice.

        Args:
            flat: The buffer.
            into: Takes the result (n elements); None: the slice itself does.
            factor: The sum is multiplied by it.
            order: Of the additions; `into` then takes the results one after the other (n elements each).
        """

    def all_reduce(self, flat: Tensor, factor: float) -> Job | None:
        """Sum `flat` over the ranks and multiply it, on all of them; None: a reduction and a gather do it."""
        return None

    @abstractmethod
    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int) -> Job:
        """Send outgoing[r] to each other rank r, while incoming[r] arrives from it; flat, contiguous, of one dtype.

        Args:
            outgoing: By rank; the own one is left alone.
            incoming: Likewise, of the size of what that rank sends.
            most: Elements of the largest message between any two ranks; the same on all.
        """

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor` from group rank `source` to all ranks."""
        with transport_errors():
            # As bytes: gloo knows neither bool nor int16, float8 and complex.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    @abstractmethod
    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        with transport_errors():
            return _unpickled(self._gather_bytes(_pickled(value)))

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message, in rank order."""
        # A gather takes one size from all ranks, so the longest message is found first, and the others are padded.
        device = torch.device("cpu") if self.device == "cpu" else gpu_of_group(self.group)
        lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)], device=device), group=self.group)
        counts = [int(length) for length in lengths]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
        padded[: len(message)] = _tensor_of(message)
        everyone: list[Tensor] = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded, group=self.group)
        return [bytes(tensor[:count].cpu().numpy()) for tensor, count in zip(everyone, counts)]

    def abort(self) -> None:
        """Break this rank's connections, so that every wait for them ends; from any thread."""
        if self.group is not None:
            break_group(self.group, self.device)

    def close(self) -> None:
        """Let go of threads, buffers and the process group."""
        self.group = None


def break_group(group: dist.ProcessGroup, device: str) -> None:
    """Break this rank's connections in a group, for one kind of device, so that every wait for them ends."""
    with suppress(RuntimeError):  # this group has nothing for such a device
        Group(backend_of(group, device), list(range(dist.get_world_size(group)))).abort()


def _carries(group: dist.ProcessGroup, device: str) -> bool:
    try:
        return backend_of(group, device) is not None
    except RuntimeError:
        # This is how torch says that a group has no backend for a device.
        return False


@contextmanager
def transport_errors() -> Iterator[None]:
    """Inside, every RuntimeError is one of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error)) from error


KEY_VARIABLE = "ZERO_STRATEGY_LOCAL_RANKS_KEY"
_MAC_BYTES = 32


def new_key() -> str:
    """A key for the environment of ranks that are about to start."""
    return secrets.token_hex(32)


def _pickled(value: Any) -> bytes:
    """The message in which a value goes to all ranks; behind a MAC if they share a key."""
    data, key = pickle.dumps(value), os.environ.get(KEY_VARIABLE)
    # Only ranks that a command has started have a key. Others trust their network, as torch does.
    return data if key is None else _seal(data, key)


def _unpickled(messages: list[bytes]) -> list[Any]:
    """The values of all ranks' messages.

    Raises:
        RuntimeError: If the ranks share a key and a message was not sent by one of them.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        return [pickle.loads(message) for message in messages]
    # All of them are checked before anything is unpickled.
    for rank, message in enumerate(messages):
        if not hmac.compare_digest(message, _seal(message[_MAC_BYTES:], key)):
            raise RuntimeError(
                f"a message in the name of rank {rank} does not come from it: another process of this host has written "
                "to the ranks' connections; nothing of it was read"
            )
    return [pickle.loads(message[_MAC_BYTES:]) for message in messages]


def _seal(data: bytes, key: str) -> bytes:
    return hmac.digest(key.encode(), data, "sha256") + data


def _tensor_of(message: bytes) -> Tensor:
    # A bytearray, since torch warns of memory that cannot be written to.
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


Swap = Callable[[Tensor, int, Tensor, int], None]
"""Sends a tensor to a rank while another one fills from a rank."""


def gather_by_doubling(value: Tensor, rank: int, size: int, swap: Swap) -> list[Tensor]:
    """Every rank's value, in rank order, in log2(size) rounds.

    Args:
        value: This rank's; of the same shape on all.
        rank: This one.
        size: Number of ranks.
        swap: Carries out one round.
    """
    count = value.numel()
    flat = value.new_empty(size * count)
    flat[:count] = value.reshape(-1)
    _fill_by_doubling(flat, range(0, (size + 1) * count, count) if count else [0] * (size + 1), rank, size, swap)
    # A few operations, however many ranks there are: it is in every step.
    return list(flat.view(size, count).roll(rank, 0).view(size, *value.shape).unbind())


def gather_parts_by_doubling(part: Tensor, lengths: Sequence[int], rank: int, size: int, swap: Swap) -> list[Tensor]:
    """Every rank's part, in rank order, as `gather_by_doubling`.

    Args:
        part: This rank's; flat.
        lengths: Elements of each rank's part; the same on all.
        rank, size, swap: As there.
    """
    ends = list(accumulate((lengths[(rank + place) % size] for place in range(size)), initial=0))
    flat = part.new_empty(ends[-1])
    flat[: ends[1]] = part
    _fill_by_doubling(flat, ends, rank, size, swap)
    places = ((other - rank) % size for other in range(size))
    return [flat[ends[place] : ends[place + 1]] for place in places]


def _fill_by_doubling(flat: Tensor, ends: Sequence[int], rank: int, size: int, swap: Swap) -> None:
    """Fill a tensor that begins with this rank's part; in round k from the rank 2^k further on (Bruck's way).

    Args:
        flat: In place i is the part of the i-th rank from this one on.
        ends: Where places begin, and the last one ends.
        rank, size, swap: See `gather_by_doubling`.
    """
    have = 1
    while have < size:
        count = min(have, size - have)  # the last round brings what is missing, if size is no power of two
        room = flat[ends[have] : ends[have + count]]
        swap(flat[: ends[count]], (rank - have) % size, room, (rank + have) % size)
        have += count


class HostCollectives(Collectives):
    """See `Collectives`; on tensors of the CPU."""

    device = "cpu"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._worker = BackgroundWorker(interrupt=self.abort)  # at exit a job may wait for a rank that is gone
        self._buffers: dict[int, Tensor] = {}
        self._shared: SharedMemoryExchange | None = None

    def start(self, run: Run) -> Future[None]:
        """Queue it for the thread."""
        return self._worker.submit(run)

    def close(self) -> None:
        """See `Collectives`."""
        super().close()
        self._worker, self._shared = BackgroundWorker(), None  # the old one's thread ends with its object
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

    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float, order: Order | None = None) -> Job:
        """See `Collectives`."""
        slices = list(flat.chunk(self.size))
        if order is not None:
            assert into is not None
            return Job(partial(self._sum_in_order, slices, into, factor, order))
        total = slices[self.rank] if into is None else into
        return Job(partial(self._sum_in_rank_order, slices, total, factor))

    def takes_scattered(self, numel: int, dtype: torch.dtype) -> bool:
        """True if `reduce_scatter_scattered` is there for so many elements. Ranks may differ in what they use."""
        shared, nbytes = self._shared, numel // self.size * dtype.itemsize
        return shared is not None and shared.available and nbytes >= LEAST_BYTES

    def reduce_scatter_scattered(
        self, source: Scattered, into: Tensor, factor: float, order: Order | None = None
    ) -> Job:
        """Reduce-scatter a flat buffer from where its parts lie; see `reduce_scatter`."""
        return Job(partial(self._sum_scattered, source, into, factor, order))

    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """See `Collectives`."""
        # Of nothing `exchange` sends no messages; every round of a doubling would send one.
        if self.size > MOST_DIRECT and value.numel():
            return gather_by_doubling(value, self.rank, self.size, self._swap)
        self.exchange([value] * self.size, values := self._room_for_all(value))
        return values

    def _swap(self, sent: Tensor, target: int, room: Tensor, source: int, first_tag: int = 1) -> None:
        into, out_of = (first_tag + tensor.nbytes % (1 << 30) for tensor in (room, sent))  # see `_exchange_by_gloo`
        with transport_errors():
            works: list[Any] = [
                dist.irecv(room.view(torch.uint8), group=self.group, group_src=source, tag=into),
                dist.isend(sent.view(torch.uint8), group=self.group, group_dst=target, tag=out_of),
            ]
            for work in works:
                work.wait()

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """See `Collectives`. Among many ranks by doubling: gloo's own gather goes round them all, twice."""
        if self.size <= MOST_DIRECT:
            return super()._gather_bytes(message)
        # Tags of their own: a rank that is at a small message of the same size is at another call.
        swap = partial(self._swap, first_tag=1 << 30)
        counts = gather_by_doubling(torch.tensor([len(message)]), self.rank, self.size, swap)
        lengths = [int(count) for count in counts]
        parts = gather_parts_by_doubling(_tensor_of(message), lengths, self.rank, self.size, swap)
        return [bytes(part.numpy()) for part in parts]

    def exchange_card(self, card: Tensor) -> list[Tensor]:
        """Exchange cards by gloo's messages alone, so that no memory is shared for it."""
        if self.size > MOST_DIRECT:
            return gather_by_doubling(card, self.rank, self.size, self._swap)
        cards = self._room_for_all(card)
        self._exchange_by_gloo([card] * self.size, cards)
        return cards

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int) -> Job:
        """See `Collectives`."""
        # As bytes: gloo does not know all dtypes.
        sent, wanted = ([tensor.view(-1).view(torch.uint8) for tensor in each] for each in (outgoing, incoming))
        return Job(partial(self.exchange, sent, wanted, most * outgoing[self.rank].itemsize))

    def exchange(self, outgoing: list[Tensor], incoming: list[Tensor], most: int | None = None) -> None:
        """Send outgoing[r] to each other rank r while incoming[r] arrives from it.

        Args:
            outgoing: By rank.
            incoming: Likewise.
            most: Bytes of the largest message between any two ranks; None: all have the same.
        """
        nbytes = outgoing[self.rank].nbytes if most is None else most
        if (shared := self._shared_memory(nbytes)) is not None:
            shared(outgoing, incoming, nbytes)
        else:
            self._exchange_by_gloo(outgoing, incoming, nbytes)

    def _room_for_all(self, local: Tensor) -> list[Tensor]:
        """This rank's value, and room for each of the others', by rank."""
        return [local if rank == self.rank else torch.empty_like(local) for rank in range(self.size)]

    def _sum_in_rank_order(self, slices: list[Tensor], total: Tensor, factor: float) -> None:
        local, in_place = slices[self.rank], total is slices[self.rank]
        if (shared := self._shared_memory(local.nbytes)) is not None:
            for one in shared.rounds([TensorMessage(each) for each in slices]):
                mine, sums = (
                    tensor.view(torch.uint8)[one.start : one.stop].view(local.dtype) for tensor in (local, total)
                )
                others = {peer: part.view(local.dtype) for peer, part in one.parts.items()}
                spare = one.spare.view(local.dtype) if in_place else None
                self._add_up(others, mine, sums, factor, spare)
            return
        arrived = {rank: self._arrivals(rank, local) for rank in range(self.size) if rank != self.rank}
        self._exchange_by_gloo(slices, [arrived.get(rank, local) for rank in range(self.size)])
        if in_place and self.rank > 1:  # what is summed up is not yet its own
            self._add_up(arrived, local, arrived[0], factor, None)
            local.copy_(arrived[0])
        else:
            self._add_up(arrived, local, total, factor, None)

    def _sum_in_order(self, slices: list[Tensor], into: Tensor, factor: float, order: Order) -> None:
        local = slices[self.rank]
        sums = list(into.chunk(len(order.results)))
        if (shared := self._shared_memory(local.nbytes)) is not None:
            size = local.element_size()
            for one in shared.rounds([TensorMessage(each) for each in slices]):
                low, high = one.start // size, one.stop // size
                parts = {peer: part.view(local.dtype) for peer, part in one.parts.items()} | {
                    self.rank: local[low:high]
                }
                order.add_up(_by_rank(parts), [each[low:high] for each in sums], factor)
            return
        parts = {rank: local if rank == self.rank else self._arrivals(rank, local) for rank in range(self.size)}
        self._exchange_by_gloo(slices, _by_rank(parts))
        order.add_up(_by_rank(parts), sums, factor)

    def _sum_scattered(self, source: Scattered, into: Tensor, factor: float, order: Order | None) -> None:
        assert self._shared is not None
        sums = list(into.chunk(1 if order is None else len(order.results)))
        count, size = sums[0].numel(), into.element_size()
        outgoing = [source.slice(rank * count, (rank + 1) * count) for rank in range(self.size)]
        for one in self._shared.rounds(outgoing):
            first, stop = one.start // size, one.stop // size
            others = {peer: part.view(into.dtype) for peer, part in one.parts.items()}
            for low, high, values in outgoing[self.rank].parts(first, stop):
                local = into.new_zeros(high - low) if values is None else values
                there = {peer: part[low - first : high - first] for peer, part in others.items()}
                if order is None:
                    self._add_up(there, local, into[low:high], factor, None)
                else:
                    parts = there | {self.rank: local}
                    order.add_up(_by_rank(parts), [each[low:high] for each in sums], factor)

    def _add_up(
        self, others: dict[int, Tensor], local: Tensor, total: Tensor, factor: float, spare: Tensor | None
    ) -> None:
        """Total becomes the sum of all, in rank order, times the factor.

        It may be the first part; if it is this rank's own, `spare` is memory of its size, where that may wait.
        """
        parts = {**others, self.rank: local}
        if spare is not None and self.rank > 1:  # until its turn in the sum comes
            parts[self.rank] = spare.copy_(local)
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

    def _shared_memory(self, nbytes: int) -> SharedMemoryExchange | None:
        """The shared memory for large messages, if all ranks share a host."""
        if nbytes < LEAST_BYTES:
            return None
        if self._shared is None:
            # Made by all ranks together: exchanges come in one order, and this size is the same on all.
            self._shared = SharedMemoryExchange(self.rank, self.size, self._exchange_by_gloo, self._timeout())
        return self._shared if self._shared.available else None

    def _timeout(self) -> float:
        """Seconds, as the group was made with."""
        assert self.group is not None
        return timeout_of(backend_of(self.group, self.device))

    def _exchange_by_gloo(self, outgoing: list[Tensor], incoming: list[Tensor], most: int | None = None) -> None:
        # Messages of other lengths are kept apart: gloo ends the process that receives more than it asked for.
        works, tag = [], 1 + (outgoing[self.rank].nbytes if most is None else most) % (1 << 30)
        try:
            for step in range(1, self.size):
                # In each step a rank sends to one other and receives from one other: none is the target of all at once.
                target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                if incoming[source].numel():  # of nothing neither side posts a message
                    works.append(dist.irecv(incoming[source], group=self.group, group_src=source, tag=tag))
                if outgoing[target].numel():
                    works.append(dist.isend(outgoing[target], group=self.group, group_dst=target, tag=tag))
            for work in works:
                assert work is not None  # every rank is a member
                work.wait()
        except RuntimeError as error:
            raise TransportError(str(error)) from error


def _by_rank(parts: dict[int, Tensor]) -> list[Tensor]:
    return [parts[rank] for rank in sorted(parts)]


_NATIVE_DTYPES = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8)
)
"""What NCCL sends as it is, in all versions; others travel as bytes."""

_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WaitedOnce:
    """Work of which only the first wait is one of torch's.

    Gloo carries out part of a collective of a GPU's tensors in `wait`, on the stream that is current then: a second
    wait would copy the result once more, over what has been computed since.

    Args:
        work: Of torch.
        device: Of its tensors.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work: Work | None = work
        self._device = device
        self._lock = threading.Lock()
        self._there: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream see the result."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None
                if self._device.type == "cuda":
                    # The result comes on this stream: a later wait on another one has to follow it.
                    self._there = torch.cuda.current_stream(self._device).record_event()
            elif self._there is not None:
                torch.cuda.current_stream(self._device).wait_event(self._there)

    def is_completed(self) -> bool:
        """True once somebody has waited for it."""
        return self._work is None


class DeviceCollectives(Collectives):
    """See `Collectives`; on tensors of a GPU."""

    device = "cuda"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._is_nccl = group is not None and "nccl" in dist.get_backend(group)

    @property
    def is_native(self) -> bool:
        """True if tensors go by the device's own library, and not by way of the host."""
        return self._is_nccl

    def warm_up(self, device: torch.device) -> None:
        """One element by each of the ways that buckets go. Only queued; the ranks have met to make the communicator.

        NCCL makes the communicator of a group at its first collective, for seconds, and asks the current device which
        one it is for. That would be inside of a hook of the first backward, in a thread of autograd.
        """
        if not self._is_nccl or self.size == 1:
            return
        with on(device), transport_errors():
            flat = torch.zeros(self.size, device=device)
            _native_all_gather(flat, self._own_slice(flat), group=self.group)
            _native_reduce_scatter(self._own_slice(flat), flat, group=self.group)

    def _own_slice(self, flat: Tensor) -> Tensor:
        count = flat.numel() // self.size
        return flat[self.rank * count : (self.rank + 1) * count]

    def start(self, run: Run) -> Work | None:
        """Run it now: it only queues what the device does."""
        return run()

    def _begin(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Work:
        """Let torch begin a collective; what it gives can be waited for any number of times."""
        work: Work = collective(*tensors, group=self.group, async_op=True, **options)
        return work if self._is_nccl else WaitedOnce(work, tensors[0].device)

    def all_gather(self, flat: Tensor) -> Job:
        """See `Collectives`."""
        if flat.dtype not in _NATIVE_DTYPES:
            flat = flat.view(torch.uint8)
        local = self._own_slice(flat)
        return Job(partial(self._begin, _native_all_gather, flat, local))

    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float, order: Order | None = None) -> Job:
        """See `Collectives`.

        In an order of the caller's slices travel as they are, and are added up here, after the wait.

        A mean is taken by NCCL itself, which divides before it adds: no float16 overflows that would not as a mean,
        and nothing is left to do. NCCL rounds the factor to the tensors' dtype, though: in 16 bits the mean of three
        ranks would be 0.2 % too large. So where that is not exact, and for other multiples, whoever has waited for the
        sum multiplies it, in float32 and on its own stream.
        """
        if order is not None:
            assert into is not None
            return self._sum_in_order(flat, into, factor, order)
        total = self._own_slice(flat) if into is None else into
        op, left = self._operation(flat.dtype, factor)
        run = partial(self._begin, _native_reduce_scatter, total, flat, op=op)
        return Job(run, None if left == 1.0 else partial(total.mul_, left))

    def _sum_in_order(self, flat: Tensor, into: Tensor, factor: float, order: Order) -> Job:
        arrived = torch.empty_like(flat)

        def add_up() -> None:
            order.add_up(arrived.chunk(self.size), into.chunk(len(order.results)), factor)

        return Job(partial(self._begin, dist.all_to_all_single, arrived, flat), add_up)

    def all_reduce(self, flat: Tensor, factor: float) -> Job:
        """See `Collectives`; one call, for which the library has algorithms of its own."""
        op, left = self._operation(flat.dtype, factor)
        run = partial(self._begin, dist.all_reduce, flat, op=op)
        return Job(run, None if left == 1.0 else partial(flat.mul_, left))

    def _operation(self, dtype: torch.dtype, factor: float) -> tuple[Any, float]:
        """The library's operation, and the factor that is left for later."""
        is_mean = self.size > 1 and factor == 1.0 / self.size and self._is_nccl
        if is_mean and (dtype.itemsize > 2 or self.size.bit_count() == 1):
            return dist.ReduceOp.AVG, 1.0
        return dist.ReduceOp.SUM, factor

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int) -> Job:
        """See `Collectives`."""
        if outgoing[self.rank].dtype not in _NATIVE_DTYPES:
            outgoing, incoming = ([tensor.view(torch.uint8) for tensor in each] for each in (outgoing, incoming))
        nothing = outgoing[self.rank].new_empty(0)  # the own part stays where it is
        sent, wanted = ([*each[: self.rank], nothing, *each[self.rank + 1 :]] for each in (outgoing, incoming))
        flat = torch.empty(sum(tensor.numel() for tensor in wanted), dtype=nothing.dtype, device=nothing.device)
        parts = flat.split([tensor.numel() for tensor in wanted])

        def arrived() -> None:
            for tensor, part in zip(wanted, parts, strict=True):
                tensor.copy_(part)

        run = partial(
            self._begin,
            dist.all_to_all_single,
            flat,
            torch.cat(sent),
            output_split_sizes=[tensor.numel() for tensor in wanted],
            input_split_sizes=[tensor.numel() for tensor in sent],
        )
        return Job(run, arrived)

    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """See `Collectives`; by way of the device, for groups that have no other."""
        device = gpu_of_group(self.group)
        values = [torch.empty_like(value, device=device) for _ in range(self.size)]
        with transport_errors():
            dist.all_gather(values, value.to(device), group=self.group)
        return list(torch.stack(values).cpu())
