"""The transport of one group: the interface of its collectives, and the messages that it carries.

a tensor, parts of a buffer in several places, or a short text.

The contract, for every implementation:

- *Into place.* Results land in the tensors that were given: a gather fills all slices of `flat` but this rank's own,
  which is there before; a reduction leaves all of `flat` but its result as it was.
- *Order of summation.* It depends on nothing but the group: the same values give the same bits at every stage and in
  every run. On the host it is the order of ranks; on a device it is that of its library.
- *Who waits.* A gather and a reduction are jobs, which somebody else has wrapped before they start. `start` never waits
  for other ranks; whoever needs the result waits for what it returns, and calls the job's `then`. All other methods
  return when they are done.
- *Who counts and watches.* Not the transport: see `instrumentation`.
- *Errors.* A connection that breaks is a `TransportError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.runtime.torch_private import backend_of
from zero_strategy.watchdog.flight_recorder import TransportError
from zero_strategy.watchdog.waits import Group

_CARD_BYTES = 256


class Message(Protocol):
    """A message to a peer, wherever its values lie."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """Copy bytes [start, stop) to a tensor of as many uint8; multiples of 64, but for the message's end."""


class TensorMessage:
    """A contiguous tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.view(-1).view(torch.uint8)
        self.nbytes = self._bytes.numel()

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """See `Message`."""
        target.copy_(self._bytes[start:stop])


class Scattered:
    """A flat buffer whose values lie elsewhere: what is sent is copied once, not into a whole buffer before.

    Flat tensors stand for parts of it; what none covers is zero.

    Args:
        numel: Elements of the whole.
        parts: First element and values of each, in order; contiguous, of one dtype. Nobody may change them.
        like: A tensor of that dtype and device, should there be no part.
    """

    def __init__(self, numel: int, parts: Iterable[tuple[int, Tensor]], like: Tensor) -> None:
        self.numel, self.dtype, self.device = numel, like.dtype, like.device
        self._starts, self._parts = list[int](), list[Tensor | None]()
        end = 0
        for start, values in parts:
            assert start >= end and values.dim() == 1 and values.is_contiguous() and values.dtype == self.dtype
            if start > end:
                self._add(end, None)
            if values.numel():
                self._add(start, values)
            end = max(end, start + values.numel())
        assert end <= numel
        if end < numel:
            self._add(end, None)
        self._starts.append(numel)

    def _add(self, start: int, values: Tensor | None) -> None:
        self._starts.append(start)
        self._parts.append(values)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Elements [start, stop): of each part of them where it begins and ends, and its values; None: zeros."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, values = self._starts[number], self._parts[number]
            end = min(stop, self._starts[number + 1])
            yield start, end, None if values is None else values[start - begin : end - begin]
            start, number = end, number + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.dtype.itemsize

    def slice(self, start: int, stop: int) -> ScatteredSlice:
        """Elements [start, stop) as a message."""
        return ScatteredSlice(self, start, stop)


class ScatteredSlice:
    """A part of a scattered buffer that is sent."""

    def __init__(self, source: Scattered, start: int, stop: int) -> None:
        self._source, self._start = source, start
        self.nbytes = (stop - start) * source.dtype.itemsize

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """The same as `Scattered.between`, counted from the slice's first element."""
        for low, high, values in self._source.between(self._start + start, self._start + stop):
            yield low - self._start, high - self._start, values

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """Copy bytes [start, stop) of the slice; whole elements."""
        size = self._source.dtype.itemsize
        into, first = target.view(self._source.dtype), start // size
        for low, high, values in self.parts(first, stop // size):
            place = into[low - first : high - first]
            if values is None:
                place.zero_()
            else:
                place.copy_(values)


def encode_card(text: str) -> Tensor:
    """A short text as bytes of a fixed length."""
    encoded = text.encode()
    assert len(encoded) <= _CARD_BYTES
    return torch.frombuffer(bytearray(encoded.ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8)


def decode_card(card: Tensor) -> str:
    """The inverse."""
    return bytes(card.tolist()).rstrip(b"\0").decode()

class Work(Protocol):
    """Work that a device has under way."""

    def wait(self) -> object:
        """Let the current stream see its result."""

    def is_completed(self) -> bool:
        """True if it is over, on the device."""


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
    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float) -> Job:
        """Sum `flat` (size x n elements) over the ranks and multiply it, for this rank its own slice.

        Args:
            flat: The buffer.
            into: Takes the result (n elements); None: the slice itself does.
            factor: The sum is multiplied by it.
        """

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor` from group rank `source` to all ranks."""
        with transport_errors():
            # As bytes: gloo knows neither bool nor int16, float8 and complex.
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)

    @abstractmethod
    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order."""

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""

    def abort(self) -> None:
        """Break this rank's connections, so that every wait for them ends; from any thread."""
        if self.group is not None:
            with suppress(RuntimeError):  # this group has nothing for such a device
                Group(backend_of(self.group, self.device), list(range(self.size))).abort()

    def close(self) -> None:
        """Let go of threads, buffers and the process group."""
        self.group = None


def _carries(group: dist.ProcessGroup, device: str) -> bool:
    try:
        return backend_of(group, device) is not None
    except RuntimeError:
        return False


@contextmanager
def transport_errors() -> Iterator[None]:
    """Inside, every RuntimeError is one of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error)) from error
