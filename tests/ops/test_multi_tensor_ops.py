"""Statistics, scaled copies, sums and flat buffers against their references."""

from __future__ import annotations

import math
import os
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, need_native, same_bits, spread
from zero_strategy import ops
from zero_strategy.ops import multi_tensor as mt

SIZES = st.lists(st.sampled_from([0, 1, 15, 16, 17, 1024, 1025, 33_000, 70_001]), min_size=1, max_size=4)
DTYPES = st.sampled_from(FLOATS)
SEEDS = st.integers(0, 1000)


def made(seed: int, sizes: list[int], dtype: torch.dtype, *, wild: bool = False, shift: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [spread(generator, n + shift, dtype, wild=wild)[shift:] for n in sizes]


@hypothesis.given(sizes=SIZES, dtype=DTYPES, order=st.sampled_from([1.0, 2.0, 3.0, 0.5, math.inf]), seed=SEEDS)
def test_grad_stats_of_finite_numbers(sizes: list[int], dtype: torch.dtype, order: float, seed: int) -> None:
    need_native()
    tensors = made(seed, sizes, dtype)
    sums, counts = ops.grad_stats(tensors, order)
    expected, expected_counts = mt._grad_stats_reference(tensors, order)
    torch.testing.assert_close(sums, expected, rtol=1e-13 if order in (1, 2) else 1e-12, atol=0)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_nonfinite_numbers_are_counted_wherever_they_are(dtype: torch.dtype, order: float) -> None:
    need_native()
    for place in (0, 15, 16, 1023, 1024, 32_767, 32_768, 40_000):
        for value in (math.inf, -math.inf, math.nan):
            tensors = [torch.ones(40_001, dtype=dtype), torch.ones(3, dtype=dtype)]
            tensors[0][place] = value
            sums, counts = ops.grad_stats(tensors, order)
            assert counts.tolist() == [1, 0]
            assert not sums[0].isfinite() and sums[1].isfinite()


def test_the_norm_does_not_depend_on_threads() -> None:
    need_native()
    tensors = made(0, [1_000_003, 17, 5], torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ops.grad_stats(tensors)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_l2norm() -> None:
    tensors = made(0, [1000, 1, 0], torch.float32)
    norm, each = ops.l2norm(tensors, per_tensor=True)
    assert each is not None
    torch.testing.assert_close(norm, torch.cat(tensors).norm())
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    assert ops.l2norm(tensors)[1] is None
    assert ops.l2norm([])[0] == 0


@hypothesis.given(sizes=SIZES, source=DTYPES, target=DTYPES, shift=st.integers(0, 3), wild=st.booleans(), seed=SEEDS)
def test_scaled_copies(
    sizes: list[int], source: torch.dtype, target: torch.dtype, shift: int, wild: bool, seed: int
) -> None:
    need_native()
    inputs = made(seed, sizes, source, wild=wild, shift=shift)
    second = made(seed + 1, sizes, target)
    results: list[list[Any]] = []
    for scale, axpby, accumulate in (
        (mt._scale, mt._axpby, mt._accumulate),
        (mt._scale_reference, mt._axpby_reference, mt._accumulate_reference),
    ):
        outputs = [[torch.zeros(n, dtype=target) for n in sizes] for _ in range(2)]
        sums = [tensor.clone() for tensor in second]
        counts = [scale(inputs, outputs[0], 0.3), axpby(inputs, second, outputs[1], 0.3, -2.0)]
        accumulate(sums, inputs, 0.7)
        results.append([*counts, *outputs[0], *outputs[1], *sums])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_multi_tensor_ops_results_may_replace_their_inputs(dtype: torch.dtype) -> None:
    need_native()
    (x,), (y,) = made(0, [5000], dtype), made(1, [5000], dtype)
    expected = torch.empty_like(x)
    ops.axpby_([x], [y], [expected], 2.0, 3.0)
    for target in (x.clone(), y.clone()):
        left, right = (target, y) if torch.equal(target, x) else (x, target)
        ops.axpby_([left], [right], [target], 2.0, 3.0)
        assert torch.equal(target, expected)
    doubled = x.clone()
    ops.scale_([doubled], [doubled], 2.0)
    assert torch.equal(doubled, (x.float() * 2).to(dtype))


def test_multi_tensor_ops_every_number_is_converted_as_torch_does() -> None:
    need_native()
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        wide = torch.empty(65536)
        ops.scale_([half.view(dtype)], [wide])
        assert same_bits(wide, half.view(dtype).float())
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=generator).to(torch.int32)
    ties = (half.view(torch.float16).float().view(torch.int32) + 0x1000).view(torch.float32)
    for values in (bits.view(torch.float32), ties):
        for dtype in (torch.float16, torch.bfloat16):
            narrow = torch.empty(len(values), dtype=dtype)
            ops.scale_([values], [narrow])
            assert same_bits(narrow, values.to(dtype))


@hypothesis.given(sizes=SIZES, source=DTYPES, flat_type=DTYPES, accumulate=st.booleans(), seed=SEEDS)
def test_flat_buffers(
    sizes: list[int], source: torch.dtype, flat_type: torch.dtype, accumulate: bool, seed: int
) -> None:
    need_native()
    tensors = made(seed, sizes, source)
    offsets = [sum(sizes[:i]) + 3 * i for i in range(len(sizes))]
    start = made(seed + 1, [sum(sizes) + 3 * len(sizes) + 1], flat_type)[0]
    flats, backs = [], []
    for flatten, unflatten in (
        (mt._flatten, mt._unflatten),
        (mt._flatten_reference, mt._unflatten_reference),
    ):
        flat, back = start.clone(), [torch.zeros_like(tensor) for tensor in tensors]
        flatten(tensors, flat, offsets, 0.5, accumulate)
        unflatten(flat, back, offsets)
        flats.append(flat)
        backs.append(back)
    assert same_bits(*flats)
    assert all(same_bits(a, b) for a, b in zip(*backs, strict=True))


BEYOND = (1 << 31) + 17
"""More elements than an int32 counts."""


def beyond() -> Tensor:
    """That many zeros, which take no room until they are written."""
    return torch.from_numpy(numpy.zeros(BEYOND, numpy.int16)).view(torch.bfloat16)


def test_grad_stats_beyond_an_int32() -> None:
    need_native()
    values = beyond()
    values[-1], values[1 << 31], values[3], values[-2] = 2.0, 1.0, 1.0, math.inf
    (total,), (count,) = ops.grad_stats([values])
    assert (float(total), int(count)) == (math.inf, 1)
    assert ops.grad_stats([values[(1 << 30) : -2]])[0].tolist() == [1.0]


def test_flat_buffers_beyond_an_int32() -> None:
    need_native()
    flat = beyond()
    values, back = [torch.arange(8.0), torch.ones(9)], [torch.zeros(8), torch.zeros(9)]
    ops.flatten_(values, flat, [1 << 31, 5])
    ops.unflatten_(flat, back, [1 << 31, 5])
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))
    assert flat[1 << 31 :].tolist() == [*range(8), *[0.0] * 9]


def test_scale_beyond_an_int32() -> None:
    need_native()
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    values = beyond()
    values[-3:] = 3.0
    assert int(ops.scale_([values], [values], 0.5)) == 0
    assert values[-4:].tolist() == [0, 1.5, 1.5, 1.5]


def test_multi_tensor_ops_pass_opcheck() -> None:
    need_native()
    x, y, out = ([torch.rand(33), torch.rand(5)] for _ in range(3))
    space = torch.ops.zero_strategy
    torch.library.opcheck(space.grad_stats.default, (x, 2.0))
    torch.library.opcheck(space.scale_.default, (x, out, 0.5))
    torch.library.opcheck(space.axpby_.default, (x, y, out, 0.5, 2.0))
    torch.library.opcheck(space.accumulate_.default, (x, y, 0.5))
    torch.library.opcheck(space.flatten_.default, (x, torch.zeros(50), [0, 40], 1.0, True))
    torch.library.opcheck(space.unflatten_.default, (torch.zeros(50), x, [0, 40]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.grad_stats([torch.ones(2).double()]), TypeError, r"tensors\[0\] must be torch.float32"),
        (lambda: ops.grad_stats([torch.ones(2)], -1), ValueError, "norm_type must be positive"),
        (lambda: ops.grad_stats([torch.ones(2)], math.nan), ValueError, "norm_type must be positive"),
        (lambda: ops.scale_([torch.ones(2)], [torch.ones(3)]), ValueError, r"inputs\[0\] has 2 elements"),
        (lambda: ops.axpby_([torch.ones(2)], [], [torch.ones(2)], 1, 1), ValueError, "y has 0 tensors"),
        (lambda: ops.flatten_([torch.ones(2)], torch.ones(3), [2]), ValueError, "offset 2 lies outside of flat"),
        (lambda: ops.flatten_([torch.ones(2)], torch.ones(3), [-1]), ValueError, "offset -1 lies outside of flat"),
        (lambda: ops.flatten_([torch.ones(2)], torch.ones(3, 1), [0]), ValueError, "flat must have one dimension"),
        (lambda: ops.unflatten_(torch.ones(3), [torch.ones(2)], []), ValueError, "offsets has 0 entries"),
    ],
)
def test_multi_tensor_ops_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_overlap_is_refused() -> None:
    memory = torch.ones(6)
    with pytest.raises(ValueError, match=r"outputs\[0\] overlaps|inputs\[0\] overlaps"):
        ops.scale_([memory[:4]], [memory[2:]])
