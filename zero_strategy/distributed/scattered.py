"""A flat buffer whose values lie elsewhere: what is sent from it is copied once, not into a whole buffer before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from torch import Tensor


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
