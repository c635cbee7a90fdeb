"""Pending collectives: handles that are waited for, and flat buffers whose values lie elsewhere.

whoever observes is told, and a watchdog watches.

what is sent from it is copied once, not into a whole buffer before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zero_strategy.runtime.observer import Observed, Span
from zero_strategy.watchdog.flight_recorder import CollectiveRecord, TransportError


class PendingWork:
    """A collective under way. `wait()` may be called any number of times; the first call finishes it.

    Args:
        works: What has to end, in order.
        observed: Who is told of waits.
        kinds: What each of the works is.
        watched: How a watchdog knows it.
        then: Called once, when all has ended.
    """

    def __init__(
        self,
        works: Sequence[Any],
        observed: Observed | None = None,
        kinds: Sequence[Span] = (),
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._works = list(works)
        self._observed, self._kinds, self._watched, self._then = observed, kinds, watched, then

    def wait(self) -> None:
        """Block until the result is in place (on a GPU: until the current stream will see it).

        Raises:
            DesyncError: If it never will be, where a watchdog watches.
        """
        works, self._works = self._works, []
        if self._watched is None or not works:
            self._finish(works)
        else:
            with self._watched:
                self._finish(works)
        then, self._then = self._then, None
        if then is not None:
            then()

    def _finish(self, works: list[Any]) -> None:
        if self._observed is None or self._observed.observer is None:
            for work in works:
                _finish(work)
            return
        for kind, work in zip(self._kinds, works, strict=True):
            with self._observed.span(kind):
                _finish(work)


class ObservedWork:
    """Work of a device's own, whose end is when somebody waits for it.

    Args:
        work: Of the device.
        ended: Called then.
    """

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        """Wait for it."""
        self._work.wait()
        self._ended()


def _finish(work: Any) -> None:
    if isinstance(work, Future):
        work.result()
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(str(error)) from error


@contextmanager
def transport() -> Iterator[None]:
    """Inside, every RuntimeError is one of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error)) from error

class Scattered:
    """Flat tensors that stand for parts of one; what none covers is zero.

    Args:
        numel: Elements of the whole.
        parts: First element and values of each, in order; contiguous, of one dtype. Nobody may change them.
        like: A tensor of that dtype, should there be no part.
    """

    def __init__(self, numel: int, parts: Iterable[tuple[int, Tensor]], like: Tensor) -> None:
        self.numel, self.dtype = numel, like.dtype
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
