"""Differences between two tensors of one shape, block by block: where, how many, how large, and in which pattern.

Elements of one dtype are compared by their bits, so the sign of zero and the bits of a NaN count. The distance of two
floating-point numbers in ulps is the number of values of their dtype from one to the other; zero has one place there,
whatever its sign. With a tolerance, numbers so close and pairs of NaN are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zero_strategy.cli.diff_slices import Part

_AT_ONCE = 1 << 18
"""Elements that are looked at in detail at once."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_PACKED = (torch.float4_e2m1fn_x2,)
"""Dtypes whose elements hold several numbers: their bits alone are compared."""
_WITHOUT_SIGN = (torch.float8_e8m0fnu,)


@dataclass(frozen=True)
class Element:
    """An element that differs.

    Attributes:
        index: In the flattened tensor.
        position: By dimension; () of a 0-d tensor.
        a, b: Both values in full precision; their bits alone where the dtype is a packed one.
        bits_a, bits_b: Their bits, hexadecimal; real and imaginary part apart.
        ulps: Distance; None where one is NaN, of other dtypes, and of numbers that are no floating-point ones.
        part_a, part_b: Writers of it; None where the checkpoint does not tell.
    """

    index: int
    position: tuple[int, ...]
    a: str
    b: str
    bits_a: str
    bits_b: str
    ulps: int | None = None
    part_a: Part | None = None
    part_b: Part | None = None


@dataclass(frozen=True)
class Hit:
    """A part of a tensor with elements that differ, and how many of them."""

    part: Part
    elements: int

    @property
    def whole(self) -> bool:
        """True if all elements of the part differ."""
        return self.elements == self.part.numel


@dataclass(frozen=True)
class Places:
    """Pattern of the elements that differ.

    Attributes:
        first: The first of them.
        start, stop: The smallest range that has all of them, in the flattened tensor.
        fixed: Dimension -> the index that all of them have in it; dimensions of one index left out.
        hits_a, hits_b: Parts that have some of them; empty where all parts have, where there is one part only, and
            where the checkpoint does not tell.
        nan_a, nan_b: Elements that are NaN on this side alone.
        first_nan: The first element that is NaN on one side alone.
        max_ulps: Largest distance; None where no two have one.
    """

    first: Element
    start: int
    stop: int
    fixed: dict[int, int] = field(default_factory=dict)
    hits_a: tuple[Hit, ...] = ()
    hits_b: tuple[Hit, ...] = ()
    nan_a: int = 0
    nan_b: int = 0
    first_nan: Element | None = None
    max_ulps: int | None = None


class Tally:
    """Differences of two tensors of one shape, which are given in blocks from the beginning to the end.

    Args:
        shape: Theirs.
        parts: The parts of A's, and those of B's.
        tolerance: Distance in ulps up to which floating-point numbers of one dtype are equal; 0 compares bits.

    Attributes:
        elements: How many differ.
        near: How many differ by their bits and are equal by the tolerance.
        max_abs: Largest absolute difference; infinite where one side is not finite, and of packed dtypes.
        max_rel: Largest difference as part of the larger side.
    """

    def __init__(
        self, shape: Sequence[int], parts: tuple[Sequence[Part], Sequence[Part]] = ((), ()), tolerance: int = 0
    ) -> None:
        self.elements = self.near = 0
        self.max_abs = self.max_rel = 0.0
        self._shape, self._parts, self._tolerance = tuple(shape), parts, tolerance
        self._first: Element | None = None
        self._first_nan: Element | None = None
        self._stop, self._max_ulps = 0, -1
        self._nan = [0, 0]
        self._counts = [np.zeros(len(each), np.int64) for each in parts]
        # Of one index are all elements of these, whether they differ or not.
        self._fixed: dict[int, int | None] = {d: None for d, size in enumerate(self._shape) if size > 1}

    def add(self, start: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compare elements from `start` on: 1-D, contiguous, of any two dtypes, on the CPU."""
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            return
        for at in range(0, x.numel(), _AT_ONCE):
            self._look_at(start + at, x[at : at + _AT_ONCE], y[at : at + _AT_ONCE])

    def places(self) -> Places | None:
        """The pattern; None where no element differs."""
        if self._first is None:
            return None
        hits = [
            tuple(Hit(part, int(n)) for part, n in zip(parts, counts, strict=True) if n) if not counts.all() else ()
            for parts, counts in zip(self._parts, self._counts, strict=True)
        ]
        return Places(
            first=self._first,
            start=self._first.index,
            stop=self._stop,
            fixed={dimension: index for dimension, index in self._fixed.items() if index is not None},
            hits_a=hits[0],
            hits_b=hits[1],
            nan_a=self._nan[0],
            nan_b=self._nan[1],
            first_nan=self._first_nan,
            max_ulps=None if self._max_ulps < 0 else self._max_ulps,
        )

    def _look_at(self, start: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.dtype == y.dtype:
            found = _differing_bits(x, y).nonzero().flatten()
        else:
            wide_x, wide_y = _wide(x, y)
            found = ((wide_x != wide_y) & ~(wide_x.isnan() & wide_y.isnan())).nonzero().flatten()
        if not found.numel():
            return
        x, y = _taken(x, found), _taken(y, found)
        distances = _ulps(x, y)
        nan_x, nan_y = _is_nan(x), _is_nan(y)
        if self._tolerance and distances is not None:
            far = np.where(nan_x | nan_y, nan_x != nan_y, distances > self._tolerance)
            self.near += len(far) - int(far.sum())
            kept = torch.from_numpy(np.flatnonzero(far))
            found, x, y = found[kept], _taken(x, kept), _taken(y, kept)
            distances, nan_x, nan_y = distances[far], nan_x[far], nan_y[far]
        if found.numel():
            self._count(start + found.numpy(), x, y, distances, nan_x, nan_y)

    def _count(
        self,
        indices: NDArray[np.int64],
        x: torch.Tensor,
        y: torch.Tensor,
        distances: NDArray[np.uint64] | None,
        nan_x: NDArray[np.bool_],
        nan_y: NDArray[np.bool_],
    ) -> None:
        """Take elements in that differ, at these indices of the flattened tensor."""

        def element(at: int) -> Element:
            known = distances is not None and not nan_x[at] and not nan_y[at]
            ulps = int(distances[at]) if known and distances is not None else None
            return self._element(int(indices[at]), x[at : at + 1], y[at : at + 1], ulps)

        one_sided = np.flatnonzero(nan_x != nan_y)
        if self._first is None:
            self._first = element(0)
            self._fixed = {d: self._first.position[d] for d in self._fixed}
        if self._first_nan is None and one_sided.size:
            self._first_nan = element(int(one_sided[0]))
        self.elements += len(indices)
        self._stop = int(indices[-1]) + 1
        self._nan[0] += int((nan_x & ~nan_y).sum())
        self._nan[1] += int((nan_y & ~nan_x).sum())
        if distances is not None and not (nan_x | nan_y).all():
            self._max_ulps = max(self._max_ulps, int(distances[~(nan_x | nan_y)].max()))
        for number, parts in enumerate(self._parts):
            if parts:
                where = np.searchsorted([part.start for part in parts], indices, side="right") - 1
                self._counts[number] += np.bincount(where, minlength=len(parts))
        for dimension, index in list(self._fixed.items()):
            inner = math.prod(self._shape[dimension + 1 :])
            if (indices // inner % self._shape[dimension] != index).any():
                del self._fixed[dimension]
        largest, relative = _gaps(x, y)
        self.max_abs, self.max_rel = max(self.max_abs, largest), max(self.max_rel, relative)

    def _element(self, index: int, x: torch.Tensor, y: torch.Tensor, ulps: int | None) -> Element:
        rest, position = index, list[int]()
        for size in reversed(self._shape):
            rest, at = divmod(rest, size)
            position.insert(0, at)
        bits_a, bits_b = _bits(x), _bits(y)
        part_a, part_b = (_part_at(parts, index) for parts in self._parts)
        a, b = _text(x, bits_a), _text(y, bits_b)
        return Element(index, tuple(position), a, b, bits_a, bits_b, ulps, part_a, part_b)


def _part_at(parts: Sequence[Part], index: int) -> Part | None:
    return parts[bisect_right(parts, index, key=lambda part: part.start) - 1] if parts else None


def _differing_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.complex128:
        return _differing_bits(torch.view_as_real(x), torch.view_as_real(y)).any(-1)
    integer = _INTEGERS[x.dtype.itemsize]
    return x.view(integer) != y.view(integer)


def _taken(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Some elements of any dtype; many dtypes cannot be indexed as such."""
    if x.dtype.itemsize not in _INTEGERS:
        return x[indices]
    return x.view(_INTEGERS[x.dtype.itemsize])[indices].view(x.dtype)


def _wide(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the double precision that holds either; a packed one as NaN, which equals nothing but NaN."""
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    packed = x.dtype in _PACKED, y.dtype in _PACKED
    values = [
        torch.full(each.shape, math.nan, dtype=wide) if is_packed else each.to(wide)
        for each, is_packed in zip((x, y), packed, strict=True)
    ]
    return values[0], values[1]


def _is_nan(x: torch.Tensor) -> NDArray[np.bool_]:
    if x.dtype in _PACKED or not (x.is_floating_point() or x.is_complex()):
        return np.zeros(x.numel(), np.bool_)
    found: NDArray[np.bool_] = (x if x.is_complex() else x.double()).isnan().numpy()
    return found


def _ulps(x: torch.Tensor, y: torch.Tensor) -> NDArray[np.uint64] | None:
    """Distances, without meaning where one is NaN; None where there are none."""
    if x.dtype != y.dtype or x.dtype in _PACKED:
        return None
    if x.is_complex():
        parts = _ulps(torch.view_as_real(x).reshape(-1), torch.view_as_real(y).reshape(-1))
        assert parts is not None
        larger: NDArray[np.uint64] = parts.reshape(-1, 2).max(axis=1)
        return larger
    if not x.is_floating_point():
        return None
    (negative_x, size_x), (negative_y, size_y) = (_sign_and_magnitude(each) for each in (x, y))
    # Both magnitudes have 63 bits at most, so neither the sum nor the difference leaves 64.
    apart = np.maximum(size_x, size_y) - np.minimum(size_x, size_y)
    distances: NDArray[np.uint64] = np.where(negative_x == negative_y, apart, size_x + size_y)
    return distances


def _sign_and_magnitude(x: torch.Tensor) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    size = x.dtype.itemsize
    bits = x.contiguous().view(_INTEGERS[size]).numpy().view(_UNSIGNED[size]).astype(np.uint64)
    sign = np.uint64(0 if x.dtype in _WITHOUT_SIGN else 1 << (8 * size - 1))
    return (bits & sign) != 0, bits & ~sign


def _gaps(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and largest relative difference."""
    if x.dtype in _PACKED or y.dtype in _PACKED:
        return math.inf, math.inf
    if x.dtype == y.dtype and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
        return _integer_gaps(x.numpy(), y.numpy())
    wide_x, wide_y = _wide(x, y)
    gap = (wide_x - wide_y).abs()
    scale = torch.maximum(wide_x.abs(), wide_y.abs())
    relative = torch.where(gap == 0, torch.zeros_like(gap), gap / scale)
    return _largest(gap), _largest(relative)


def _integer_gaps(x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """Exact differences: numbers of 64 bits are more than doubles can tell apart."""
    kind = _UNSIGNED[x.dtype.itemsize]
    # The difference of the larger and the smaller one fits the unsigned dtype, whatever the signs.
    gap = (np.maximum(x, y).view(kind) - np.minimum(x, y).view(kind)).astype(np.float64)
    scale = np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
    return float(gap.max()), float((gap / np.maximum(scale, 1)).max())


def _largest(values: torch.Tensor) -> float:
    return float(torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max())


def _bits(x: torch.Tensor) -> str:
    """Bits of one element."""
    if x.is_complex():
        return ",".join(map(_bits, torch.view_as_real(x).reshape(-1).split(1)))
    content = bytes(x.contiguous().view(torch.uint8).tolist())
    return f"0x{int.from_bytes(content, 'little'):0{2 * len(content)}x}"


def _text(x: torch.Tensor, bits: str) -> str:
    """One element in as many digits as tell it from any other double."""
    if x.dtype in _PACKED:
        return bits
    return repr((x.double() if x.is_floating_point() else x).item())
