"""Elements that differ, against a formula for each element in Python's own numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checkpoint.saving import random_tensor
from zero_strategy.checkpoint.layout import DTYPES
from zero_strategy.cli.diff_slices import Part
from zero_strategy.cli.diff_tensors import Places, Tally

PACKED = torch.float4_e2m1fn_x2
SMALL_FLOATS = [
    dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype.itemsize < 4 and dtype != PACKED
]


def tallied(x: torch.Tensor, y: torch.Tensor, tolerance: int = 0, cut: int = 7) -> Tally:
    """Both given in blocks of so many elements."""
    tally = Tally(x.shape, tolerance=tolerance)
    flat_x, flat_y = x.contiguous().reshape(-1), y.contiguous().reshape(-1)
    for start in range(0, flat_x.numel(), cut):
        tally.add(start, flat_x[start : start + cut], flat_y[start : start + cut])
    return tally


def places(tally: Tally) -> Places:
    found = tally.places()
    assert found is not None
    return found


def elements_of(x: torch.Tensor) -> list[bytes]:
    flat = x.contiguous().reshape(-1).view(torch.uint8).tolist()
    size = x.dtype.itemsize
    return [bytes(flat[at : at + size]) for at in range(0, len(flat), size)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_counts_and_ends_of_any_dtype_are_those_of_its_bytes(dtype: torch.dtype) -> None:
    x = random_tensor(dtype, (5, 6), 1)
    changed = bytearray(b"".join(elements_of(x)))
    for index in range(1, 30, 4):
        at = index * dtype.itemsize
        changed[at] = 1 - changed[at] if dtype == torch.bool else changed[at] ^ 1
    other = torch.frombuffer(changed, dtype=torch.uint8).view(dtype).view(5, 6)
    expected = [i for i, (a, b) in enumerate(zip(elements_of(x), elements_of(other), strict=True)) if a != b]
    tally = tallied(x, other)
    found = places(tally)
    assert tally.elements == len(expected) > 1
    assert (found.start, found.stop) == (expected[0], expected[-1] + 1)
    assert found.first.position == (expected[0] // 6, expected[0] % 6)
    bits = [element[::-1].hex() for element in (elements_of(x)[expected[0]], elements_of(other)[expected[0]])]
    assert [each.replace("0x", "") for each in (found.first.bits_a, found.first.bits_b)] == [
        each if not dtype.is_complex else f"{each[8:]},{each[:8]}" for each in bits
    ]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_ulps_are_steps_from_value_to_value(dtype: torch.dtype) -> None:
    integer = torch.uint8 if dtype.itemsize == 1 else torch.int16
    values = torch.arange(256**dtype.itemsize).to(integer).view(dtype)
    wide = values.double()
    finite = ~wide.isnan()
    numbers = wide[finite].tolist()
    # Zeros of both signs are one value.
    rank = {number: place for place, number in enumerate(sorted(set(numbers)))}
    kept = values.view(integer)[finite].view(dtype)
    draw = torch.Generator().manual_seed(0)
    picks = [torch.randint(0, len(numbers), (120,), generator=draw) for _ in range(2)]
    for i, j in zip(*(each.tolist() for each in picks), strict=True):
        x, y = (kept.view(integer)[k : k + 1].view(dtype) for k in (i, j))
        tally = Tally((1,))
        tally.add(0, x, y)
        distance = abs(rank[numbers[i]] - rank[numbers[j]])
        if tally.elements:
            assert places(tally).max_ulps == places(tally).first.ulps == distance
        else:
            assert x.view(integer).equal(y.view(integer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ulps_of_wide_floats(dtype: torch.dtype) -> None:
    one, inf = torch.tensor([1.0], dtype=dtype), torch.tensor([math.inf], dtype=dtype)
    for x, y, expected in [
        (one, torch.nextafter(torch.nextafter(one, inf), inf), 2),
        (-one * 0, one * 0, 0),
        (-torch.nextafter(one * 0, inf), torch.nextafter(one * 0, inf), 2),
        (torch.tensor([torch.finfo(dtype).max], dtype=dtype), inf, 1),
    ]:
        assert places(tallied(x, y)).max_ulps == expected
    largest = places(tallied(-inf, inf)).max_ulps
    assert largest == 2 * (0x7F800000 if dtype == torch.float32 else 0x7FF0000000000000)


def test_whole_numbers_of_64_bits_are_told_apart() -> None:
    x = torch.tensor([2**62, -(2**63), 5])
    tally = tallied(x, torch.tensor([2**62 + 1, 2**63 - 1, 5]))
    assert tally.elements == 2 and tally.max_abs == float(2**64 - 1)
    first = places(tally).first
    assert (first.a, first.b, first.ulps) == (str(2**62), str(2**62 + 1), None)
    unsigned = torch.tensor([2**64 - 1], dtype=torch.uint64)
    tally = tallied(unsigned, torch.tensor([0], dtype=torch.uint64))
    assert tally.max_abs == float(2**64 - 1) and places(tally).first.a == str(2**64 - 1)


def test_nan_signs_of_zero_and_a_tolerance() -> None:
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    x = torch.tensor([math.nan, math.nan, 1.0, 0.0, 1.0, 2.0])
    y = torch.cat([other_nan, torch.tensor([1.0, math.nan, -0.0, 1.0 + 2**-22, 2.0])])
    bits = tallied(x, y)
    assert bits.elements == 5 and math.isinf(bits.max_abs)
    found = places(bits)
    assert (found.nan_a, found.nan_b, found.max_ulps) == (1, 1, 2)
    assert found.first.index == 0 and found.first_nan is not None and found.first_nan.index == 1
    assert found.first.bits_b == "0x7fc00001"
    near = tallied(x, y, tolerance=1)
    assert near.elements == 3 and near.near == 2  # the pair of NaN, and the zeros
    assert tallied(x, y, tolerance=2).elements == 2
    assert tallied(torch.tensor([1]), torch.tensor([2]), tolerance=9).elements == 1  # whole numbers have no ulps


def test_rows_columns_and_slices() -> None:
    x = torch.zeros(6, 8)
    for change, expected in [
        ((2, slice(None)), {0: 2}),
        ((slice(None), 5), {1: 5}),
        ((2, 5), {0: 2, 1: 5}),
        ((slice(1, 3), slice(2, 4)), {}),
    ]:
        y = x.clone()
        y[change] = 1
        assert places(tallied(x, y)).fixed == expected
    # Of three ranks the second has all of its elements different, the third has one.
    parts = [Part(0, 10, 0), Part(10, 30, 1), Part(30, 48, 2)]
    y = x.clone()
    y.view(-1)[10:31] = 1
    tally = Tally(x.shape, (parts, parts[:0]))
    for start in range(0, 48, 16):
        tally.add(start, x.view(-1)[start : start + 16], y.view(-1)[start : start + 16])
    found = places(tally)
    assert [(hit.part.rank, hit.elements, hit.whole) for hit in found.hits_a] == [(1, 20, True), (2, 1, False)]
    assert found.hits_b == () and found.first.part_a == parts[1] and found.first.part_b is None
    every = Tally(x.shape, (parts, parts))
    every.add(0, x.view(-1), x.view(-1) + 1)
    assert places(every).hits_a == ()


def test_other_dtypes_are_compared_by_value() -> None:
    x = torch.tensor([1.0, math.nan, 3.0000002])
    tally = tallied(x, x.half())
    assert tally.elements == 1 and places(tally).first.index == 2 and places(tally).first.ulps is None
    assert tallied(torch.tensor([1, 2]), torch.tensor([1.0, 2.0])).elements == 0
    packed = torch.zeros(2, dtype=torch.uint8).view(PACKED)
    assert tallied(packed, torch.zeros(2)).elements == 2
    assert tallied(torch.ones(2, dtype=torch.complex64), torch.ones(2)).elements == 0


def test_tensors_of_no_dimension_and_of_no_element() -> None:
    tally = tallied(torch.tensor(1.5), torch.tensor(2.5))
    assert tally.elements == 1 and places(tally).first.position == () and places(tally).fixed == {}
    assert tallied(torch.zeros(0, 3), torch.zeros(0, 3)).places() is None
    # A dimension of one index tells nothing.
    assert places(tallied(torch.zeros(1, 4), torch.ones(1, 4))).fixed == {}


def test_a_block_larger_than_what_is_looked_at_at_once() -> None:
    numel = (1 << 18) * 2 + 5
    x, y = torch.zeros(numel), torch.zeros(numel)
    y[[3, 1 << 18, numel - 1]] = 1
    tally = Tally(x.shape)
    tally.add(0, x, y)
    assert (tally.elements, places(tally).start, places(tally).stop) == (3, 3, numel)
