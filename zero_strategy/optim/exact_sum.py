"""Exact sums of powers as numbers: digits of parts and of ranks added up, and the total rounded once.

Digits are those of `ops.exact_sums`: rows of integers, of which each number of the sum has added to some. Whatever the
numbers were grouped into, the digits stand for the same integer, and `rounded` gives its nearest float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_strategy.ops.block_sums import DIGITS, INFINITE, LEAST, NAN, WORDS, carried

_MOST_ORDER, _MOST_SHIFT = 4.0, 100
"""Powers up to this one of all float32 numbers times 2 to so much are between 2 ** -996 and 2 ** 912."""


def added(digits: Tensor) -> Tensor:
    """The sum of all rows: (rows, WORDS) int64 to (WORDS,), with digits of at most 2 ** 32."""
    return carried(digits.sum(dim=0))


def rounded(digits: Tensor) -> float:
    """The float64 nearest to a sum, ties to even: inf beyond the largest, and where a number was inf; else nan.

    Args:
        digits: (WORDS,), integers of any size and dtype.
    """
    words = [int(word) for word in digits.tolist()]
    if words[NAN]:
        return math.nan
    if words[INFINITE]:
        return math.inf
    try:
        # Python rounds the quotient of two integers correctly, whatever their sizes.
        return _integer(words) / (1 << -LEAST)
    except OverflowError:
        return math.inf


def nearly(digits: Tensor) -> Tensor:
    """Sums within two units of the last bit, for those who look at parts: (rows, WORDS) to (rows,) float64, there.

    The largest digit and the two below it say so much; nothing waits for a device.
    """
    values = digits[:, :DIGITS].double()
    numbers = digits.new_ones(DIGITS).cumsum(0) - 1
    top = ((values > 0) * numbers).amax(dim=1, keepdim=True)
    found = torch.zeros_like(values[:, 0])
    for below in (2, 1, 0):
        place = top - below
        digit = values.gather(1, place.clamp(min=0)) * (place >= 0)
        found = found * 2.0**-32 + digit.squeeze(1)
    exponent = top.squeeze(1) * 32 + LEAST
    half = exponent >> 1  # of which the power is a number, where that of the whole may be none
    found = found * _power_of_two(half) * _power_of_two(exponent - half)
    return found.masked_fill_(digits[:, INFINITE] > 0, math.inf).masked_fill_(digits[:, NAN] > 0, math.nan)


def _power_of_two(exponents: Tensor) -> Tensor:
    return (exponents + 1023 << 52).view(torch.float64)


def flag_bad_factors(digits: Tensor, counts: Tensor, factors: Sequence[float]) -> None:
    """Take parts whose factors are not finite for such, in place.

    Args:
        digits: (parts, WORDS) int64, of the parts without these factors.
        counts: (parts,) int64: how many elements are not finite.
        factors: One for each part.
    """
    for index, factor in enumerate(factors):
        if not math.isfinite(factor):
            digits[index, NAN if math.isnan(factor) else INFINITE] += 1
            counts[index] += 1


def times_power(digits: Tensor, norm_type: float, factor: float) -> Tensor | None:
    """The digits of the powers of all numbers times a factor, where these have the same bits.

    Args:
        digits: (WORDS,) int64, of powers of float32 numbers, or of narrower ones.
        norm_type: p.
        factor: Any number.

    Returns:
        (WORDS,) int64; None: the numbers have to be looked at again.
    """
    words = [int(word) for word in digits.tolist()]
    if words[INFINITE] or words[NAN]:
        return None
    if abs(factor) == 1.0:
        return digits
    mantissa, exponent = math.frexp(abs(factor))
    shift = norm_type * (exponent - 1)
    # Products and roots of numbers times 2 ** k are those of the numbers times 2 ** (p k), each rounded alike, if p k
    # is an integer and no power of a float32 leaves the range of normal float64 numbers. Of a library's `pow` nobody
    # knows.
    alike = norm_type <= _MOST_ORDER and 2 * norm_type == math.floor(2 * norm_type) and abs(exponent) <= _MOST_SHIFT
    if mantissa != 0.5 or not alike or shift != math.floor(shift):
        return None
    number, places = _integer(words), int(shift)
    assert places >= 0 or number & ((1 << -places) - 1) == 0
    number = number << places if places >= 0 else number >> -places
    found = [number >> 32 * index & 0xFFFFFFFF for index in range(DIGITS)]
    return torch.tensor([*found, 0, 0])


def _integer(words: Sequence[int]) -> int:
    """The sum in units of the first digit."""
    assert len(words) == WORDS
    return sum(word << 32 * index for index, word in enumerate(words[:DIGITS]) if word)
