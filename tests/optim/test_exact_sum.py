"""Totals of exact sums: rounded as `math.fsum` rounds, whatever was added first."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from zero_strategy.ops import exact_sums
from zero_strategy.ops.block_sums import DIGITS, INFINITE, LEAST, NAN, WORDS, carried
from zero_strategy.optim.exact_sum import added, flag_bad_factors, nearly, rounded, times_power

NUMBERS = st.lists(st.floats(0.0, 2.0**1010, allow_subnormal=True), min_size=1, max_size=40)


def digits_of(values: list[float]) -> Tensor:
    """Each number alone in a block: (numbers, WORDS)."""
    return exact_sums([torch.tensor([value], dtype=torch.float64) for value in values], 1.0)[0]


@hypothesis.given(values=NUMBERS)
def test_a_total_is_rounded_as_fsum_does(values: list[float]) -> None:
    rows = digits_of(values)
    assert rounded(added(rows)) == math.fsum(values)
    assert rounded(added(rows.flip(0))) == math.fsum(values)
    assert rounded(rows.double().sum(dim=0)) == math.fsum(values)  # as numbers of a device's collective
    for value, near in zip(values, nearly(rows).tolist(), strict=True):
        assert abs(value - near) <= 2 * math.ulp(value)
    assert abs(float(nearly(added(rows).unsqueeze(0))) - math.fsum(values)) <= 2 * math.ulp(math.fsum(values))


def test_ties_go_to_even_numbers() -> None:
    one, half = 1.0, 2.0**-53
    for values, expected in (
        ([one, half], one),
        ([one, half, 2.0**-1074], one + 2 * half),
        ([one + 2 * half, half], one + 4 * half),
        ([2.0**-1074] * 3, 3 * 2.0**-1074),
        ([2.0**-1022, 2.0**-1074], 2.0**-1022 + 2.0**-1074),
    ):
        assert rounded(added(digits_of(values))) == expected == math.fsum(values)


def test_totals_beyond_float64_are_infinite_and_their_digits_finite() -> None:
    largest = math.ldexp(2.0**53 - 1, 971)
    rows = digits_of([largest])
    assert rounded(rows[0]) == largest
    assert rounded(added(torch.cat([rows, digits_of([2.0**969])]))) == largest  # less than half of a last bit
    assert rounded(added(torch.cat([rows, digits_of([2.0**970])]))) == math.inf  # a tie
    many = rows[0]
    for _ in range(60):
        many = carried(many + many)
    assert int(many.min()) >= 0 and int(many.max()) < 1 << 53 and not many[INFINITE:].any()
    assert rounded(many) == math.inf


def test_numbers_that_are_not_finite_are_those_of_a_sum() -> None:
    nan, inf = math.nan, math.inf
    for values in ([1.0, inf], [inf, nan], [nan, 1.0], [nan, nan]):
        rows = digits_of(values)
        total = sum(values)
        assert repr(rounded(added(rows))) == repr(total) == repr(float(nearly(added(rows).unsqueeze(0))))
    digits, counts = digits_of([1.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.int64)
    flag_bad_factors(digits, counts, [inf, 0.5, nan])
    assert counts.tolist() == [1, 0, 1] and [rounded(row) for row in digits[:2]] == [inf, 2.0]
    assert math.isnan(rounded(digits[2])) and int(digits[2, NAN]) == 1


def test_carries_change_digits_and_no_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(0, 1 << 62, (5, WORDS), generator=generator)
    digits[:, DIGITS - 1 :] = 3
    digits[0, :DIGITS] = (1 << 32) - 1
    found = carried(digits)
    assert int(found[:, : DIGITS - 1].max()) <= 1 << 32 and torch.equal(found[:, DIGITS:], digits[:, DIGITS:])
    for before, after in zip(digits.tolist(), found.tolist(), strict=True):
        assert sum(d << 32 * i for i, d in enumerate(before[:DIGITS])) == sum(
            d << 32 * i for i, d in enumerate(after[:DIGITS])
        )


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 2.5, 3.0, 4.0])
def test_powers_times_a_factor_have_the_digits_of_a_second_look(order: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-20
    values[3:5] = torch.tensor([3e38, 1e-45])
    (digits,), _ = exact_sums([values], order)
    looked_again = 0
    for factor in (1.0, -1.0, 0.25, -4.0, 2.0**-16, 2.0**90, 2.0, 0.3, 2.0**200):
        found, (expected,) = times_power(digits, order, factor), exact_sums([values], order, [factor])[0]
        looked_again += found is None
        if found is not None:
            assert rounded(found) == rounded(expected)
            assert integer(found) == integer(expected)
    assert looked_again == (3 if order % 1 else 2)
    digits[INFINITE] = 1
    assert times_power(digits, order, 1.0) is None


def integer(digits: Tensor) -> Fraction:
    return Fraction(sum(digit << 32 * place for place, digit in enumerate(digits[:DIGITS].tolist())), 1 << -LEAST)
