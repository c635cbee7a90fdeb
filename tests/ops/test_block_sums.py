"""Exact sums of powers: of blocks by a formula in plain Python, of all blocks by `math.fsum`, which rounds once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, at_every_thread_count, need_native, spread
from zero_strategy import ops
from zero_strategy.ops import block_sums, foreach
from zero_strategy.ops.block_sums import BLOCK, DIGITS, INFINITE, LEAST, NAN, WORDS
from zero_strategy.optim.exact_sum import rounded

ORDERS = (1.0, 2.0, 3.0, 0.5, 2.5, 32.0)
SIZES = st.lists(st.sampled_from([0, 1, 15, 16, 17, 1024, 1025, 33_000]), min_size=1, max_size=4)


def sums_of_blocks(values: Tensor, order: float, factor: float = 1.0) -> list[float]:
    """In plain Python: powers by products from the highest bit on and a root, sums in halves."""
    powers = [power_of(abs(value * factor), order) for value in values.double().tolist()]
    found = []
    for start in range(0, len(powers), BLOCK):
        block = powers[start : start + BLOCK]
        block += [0.0] * (BLOCK - len(block))
        while len(block) > 1:
            half = len(block) // 2
            block = [a + b for a, b in zip(block[:half], block[half:], strict=True)]
        found += block
    return found


def power_of(value: float, order: float) -> float:
    result = 1.0
    for bit in f"{int(order):b}" if order >= 1 else "":
        result *= result
        result *= value if bit == "1" else 1.0
    return result * math.sqrt(value) if order % 1 else result


def integer_of(digits: Tensor) -> int:
    """The sum in units of the first digit, which is one number however digits carry."""
    return sum(int(digit) << 32 * place for place, digit in enumerate(digits[:DIGITS].tolist()))


def same_sums(digits: Tensor, others: Tensor) -> bool:
    return all(
        integer_of(a) == integer_of(b) and torch.equal(a[DIGITS:], b[DIGITS:])
        for a, b in zip(digits, others, strict=True)
    )


def reference(tensors: Sequence[Tensor], order: float, factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    return block_sums._exact_sums_reference(tensors, order, torch.tensor(factors, dtype=torch.float64).view(-1, 1))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("order", ORDERS)
def test_an_exact_sum_is_the_sum_of_block_sums_rounded_once(dtype: torch.dtype, order: float) -> None:
    need_native()
    values = spread(torch.Generator().manual_seed(0), 5003, dtype)
    for factor in (1.0, 0.25, -8.0):
        digits, counts = ops.exact_sums([values], order, [factor])
        blocks = sums_of_blocks(values, order, factor)
        assert digits.shape == (1, WORDS) and counts.tolist() == [0]
        assert Fraction(integer_of(digits[0]), 1 << -LEAST) == sum(map(Fraction, blocks))
        assert rounded(digits[0]) == math.fsum(blocks)


@hypothesis.given(
    sizes=SIZES,
    dtype=st.sampled_from(FLOATS),
    order=st.sampled_from(ORDERS),
    factor=st.sampled_from([1.0, 0.25, 3.0, -(2.0**-20), 1e200]),
    wild=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_exact_sums_have_the_references_digits(
    sizes: list[int], dtype: torch.dtype, order: float, factor: float, wild: bool, seed: int
) -> None:
    need_native()
    generator = torch.Generator().manual_seed(seed)
    tensors = [spread(generator, size, dtype, wild=wild) for size in sizes]
    factors = [factor if index % 2 else 1.0 for index in range(len(sizes))]
    digits, counts = ops.exact_sums(tensors, order, factors)
    expected, expected_counts = reference(tensors, order, factors)
    assert same_sums(digits, expected) and torch.equal(counts, expected_counts)
    assert int(digits.min()) >= 0 and int(digits[:, : DIGITS - 1].max()) < 1 << 32


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.5, 7.3])
def test_exact_sums_do_not_depend_on_cuts_between_blocks(order: float) -> None:
    need_native()
    values = spread(torch.Generator().manual_seed(1), 100_007, torch.float32)
    (whole,), _ = ops.exact_sums([values], order)
    for sizes in ([16, 99_991], [32_768, 160, 67_079], [50_000, 50_007]):
        parts = [part.clone() for part in values.split(sizes)]
        for digits, _ in (ops.exact_sums(parts, order), ops.exact_sums(parts[::-1], order)):
            assert integer_of(digits.sum(dim=0)) == integer_of(whole)
    for digits, _ in at_every_thread_count(lambda: ops.exact_sums([values], order)):
        assert torch.equal(digits[0], whole)


def test_digits_take_as_many_blocks_as_a_chunk_has() -> None:
    """All blocks have the largest mantissa, and digits take its upper 52 bits."""
    need_native()
    largest = float(2**24 - 1)
    block = torch.tensor([largest * 2**29, largest * 2**5, 31.0] + [0.0] * 13) * 2.0**11
    values = block.repeat(3 * 2048)
    assert sums_of_blocks(block, 1.0) == [(2.0**53 - 1) * 2**11]
    place = int.from_bytes(torch.tensor([(2.0**53 - 1) * 2**11]).double().numpy().tobytes(), "little") >> 52
    assert place % 32 == 31, "or the upper part has fewer bits"
    for digits, _ in (ops.exact_sums([values], 1.0), reference([values], 1.0, [1.0])):
        assert Fraction(integer_of(digits[0]), 1 << -LEAST) == 3 * 2048 * (2**53 - 1) * 2**11


def test_the_smallest_and_the_largest_numbers_of_float64_are_added_exactly() -> None:
    for exponents in (range(-1074, -1000), range(950, 1020), range(-1074, 1020)):
        values = torch.tensor([(-1.0) ** e * math.ldexp(1.0 + 2.0**-20, e) for e in exponents], dtype=torch.float64)
        for order in (1.0, 2.0):
            blocks = sums_of_blocks(values, order) if order == 1 else sums_of_blocks(values[: len(values) // 2], 2.0)
            used = values if order == 1 else values[: len(values) // 2]
            (digits,), _ = ops.exact_sums([used], order)
            if all(map(math.isfinite, blocks)):
                assert Fraction(integer_of(digits), 1 << -LEAST) == sum(map(Fraction, blocks))
            else:
                assert int(digits[INFINITE]) == sum(map(math.isinf, blocks)) and not digits[NAN]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 7.3])
def test_elements_of_exact_sums_that_are_not_finite_are_counted(dtype: torch.dtype, order: float) -> None:
    need_native()
    for place in (0, 15, 16, 1023, 1024, 32_768, 40_000):
        for value in (math.inf, -math.inf, math.nan):
            tensors = [torch.ones(40_001, dtype=dtype), torch.ones(3, dtype=dtype)]
            tensors[0][place] = value
            digits, counts = ops.exact_sums(tensors, order)
            assert counts.tolist() == [1, 0]
            assert digits[:, INFINITE:].tolist() == [[0, 1] if math.isnan(value) else [1, 0], [0, 0]]
            assert repr(rounded(digits[0])) == repr(abs(value)) and rounded(digits[1]) == 3.0


def test_powers_that_overflow_are_infinite_and_their_elements_finite() -> None:
    need_native()
    digits, counts = ops.exact_sums([torch.tensor([3e38, 1.0])], 12.0)
    assert counts.tolist() == [0] and rounded(digits[0]) == math.inf
    assert ops.exact_sums_and_flags([torch.tensor([3e38, 1.0])], 12.0)[1].tolist() == [1]


@pytest.mark.parametrize("batch", [1024, 2048, 1 << 16])
def test_the_reference_takes_a_part_at_a_time(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the memory of a GPU, with temporaries of so many elements."""
    generator = torch.Generator().manual_seed(2)
    tensors = [spread(generator, size, torch.float32) for size in (5, 0, 3000, 1024, 17, 2049)]
    factors = [1.0, 2.0, 0.5, 1.0, 4.0, 3.0]
    expected = reference(tensors, 2.0, factors)[0]
    monkeypatch.setattr(block_sums, "_ON_CPU", batch)
    monkeypatch.setattr(foreach, "BATCH", batch)
    parts = list(block_sums._batches(tensors))
    assert all(sum(each.sizes) <= batch for each in parts) and (len(parts) > 1) == (batch < 1 << 16)
    assert same_sums(reference(tensors, 2.0, factors)[0], expected)
    assert same_sums(ops.exact_sums_and_flags(tensors, 2.0, factors)[0], expected)


def test_exact_sums_pass_opcheck() -> None:
    need_native()
    tensors, factors = [torch.rand(33), torch.rand(5)], torch.ones(2, 1, dtype=torch.float64)
    torch.library.opcheck(torch.ops.zero_strategy.exact_sums.default, (tensors, 2.0, factors))
    assert ops.exact_sums([])[0].shape == (0, WORDS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.exact_sums([torch.ones(2).int()]), TypeError, r"tensors\[0\] must be torch.float32"),
        (lambda: ops.exact_sums([torch.ones(4, 4).t()[:2]]), ValueError, r"tensors\[0\].* must be contiguous"),
        (lambda: ops.exact_sums([torch.ones(2)], -1), ValueError, "norm_type must be positive"),
        (lambda: ops.exact_sums([torch.ones(2)], math.inf), ValueError, "norm_type must be finite"),
        (lambda: ops.exact_sums([torch.ones(2)], 2, [1.0, 2.0]), ValueError, "factors has 2 entries"),
        (lambda: ops.exact_sums([torch.ones(2)], 2, [math.nan]), ValueError, r"factors\[0\] must be finite, not nan"),
    ],
)
def test_bad_input_of_exact_sums_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
