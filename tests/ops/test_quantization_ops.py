"""Block quantisation: bits of the reference, error bounds, bad blocks and sums."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, at_every_thread_count, need_native, normal, same_bits, spread
from zero_strategy import ops
from zero_strategy.ops import quantization as q

SIZES = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 1025, 5000, 33_001])
BLOCKS = st.sampled_from([2, 32, 62, 256, 2048, 100_000])


@hypothesis.settings(max_examples=80)
@hypothesis.given(
    numel=SIZES, block=BLOCKS, bits=st.sampled_from([4, 8]), dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from(FLOATS), wild=st.booleans(), seed=st.integers(0, 100),
)  # fmt: skip
def test_quantization_ops_kernel_and_reference_give_the_same_bits(
    numel: int, block: int, bits: int, dtype: torch.dtype, scale: torch.dtype, wild: bool, seed: int
) -> None:
    need_native()
    x = spread(torch.Generator().manual_seed(seed), numel, dtype, wild=wild)
    quantized = [call(x, bits, block, scale) for call in (q._quantize, q._quantize_reference)]
    assert all(same_bits(a, b) for a, b in zip(*quantized, strict=True))
    codes, scales = quantized[0]
    values = [call(codes, scales, numel, block, dtype) for call in (q._dequantize, q._dequantize_reference)]
    assert same_bits(*values)
    sums = [call([codes] * 3, [scales] * 3, numel, block) for call in (q._reduce, q._reduce_reference)]
    assert same_bits(*sums)


@hypothesis.given(
    numel=SIZES, block=BLOCKS, bits=st.sampled_from([4, 8]), scale=st.sampled_from(FLOATS),
    power=st.integers(-30, 5), seed=st.integers(0, 100),
)  # fmt: skip
def test_the_error_is_at_most_half_a_step(
    numel: int, block: int, bits: int, scale: torch.dtype, power: int, seed: int
) -> None:
    need_native()
    x = normal(torch.Generator().manual_seed(seed), (numel,), torch.float32) * 10.0**power
    codes, scales = ops.quantize_blocks(x, bits=bits, block_size=block, scale_dtype=scale)
    hypothesis.assume(bool(scales.isfinite().all()))
    back = ops.dequantize_blocks(codes, scales, x.shape, block_size=block)
    steps = scales.double().repeat_interleave(block)[:numel]
    assert ((back.double() - x).abs() <= steps * (0.5 + 1e-5)).all()
    if power > -4 or scale != torch.float16:  # there a step is a little above what it must be, not much
        largest = q._blocks(x, block).abs().amax(1) / (127 if bits == 8 else 7)
        assert (scales.double() <= largest * 1.01 + 1e-30).all()


def test_codes_in_their_bytes() -> None:
    for native in (False, True):
        if native:
            need_native()
        codes, scales = ops.quantize_blocks(torch.tensor([7.0, -7.0, 1.0, -1.0, 3.5]), bits=4, block_size=4)
        assert codes.tolist() == [0x97, 0xF1, 0x07] and scales.tolist() == [1.0, 0.5]
        codes, scales = ops.quantize_blocks(torch.tensor([127.0, -127.0, 0.5, 1.5, -0.0]), block_size=256)
        assert codes.tolist() == [127, -127, 0, 2, 0] and scales.tolist() == [1.0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e8])
def test_a_bad_element_makes_its_block_nan(bits: int, bad: float) -> None:
    need_native()
    x = torch.ones(12)
    x[5] = bad
    codes, scales = ops.quantize_blocks(x, bits=bits, block_size=4)
    back = ops.dequantize_blocks(codes, scales, (3, 4), block_size=4)
    assert back.isnan().tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert ops.dequantize_reduce([codes, codes], [scales, scales], (12,), block_size=4).isnan().sum() == 4


def test_a_block_of_zeros_stays_zero() -> None:
    need_native()
    codes, scales = ops.quantize_blocks(torch.zeros(10), block_size=4)
    assert not codes.any() and not scales.any()
    assert not ops.dequantize_blocks(codes, scales, (10,), block_size=4).any()


def test_a_sum_is_taken_in_the_order_of_the_lists() -> None:
    need_native()
    generator = torch.Generator().manual_seed(0)
    parts = [normal(generator, (7, 301), torch.float32) * 10.0**power for power in (3, -2, 0)]
    for bits in (4, 8):
        quantized = [ops.quantize_blocks(part, bits=bits) for part in parts]
        codes, scales = zip(*quantized, strict=True)
        expected = torch.zeros(7, 301)
        for code, scale in quantized:
            expected += ops.dequantize_blocks(code, scale, (7, 301))
        assert torch.equal(ops.dequantize_reduce(codes, scales, (7, 301)), expected)


def test_quantization_ops_results_do_not_depend_on_threads() -> None:
    need_native()
    x = normal(torch.Generator().manual_seed(0), (200_001,), torch.float32)

    def run() -> list[Tensor]:
        codes, scales = ops.quantize_blocks(x, bits=4)
        return [codes, scales, ops.dequantize_reduce([codes, codes], [scales, scales], x.shape)]

    first, *others = at_every_thread_count(run)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_quantization_ops_pass_opcheck() -> None:
    need_native()
    space, x = torch.ops.zero_strategy, torch.randn(1001)
    for bits in (4, 8):
        torch.library.opcheck(space.quantize_blocks.default, (x, bits, 64, torch.float16))
        codes, scales = ops.quantize_blocks(x, bits=bits, block_size=64)
        torch.library.opcheck(space.dequantize_blocks.default, (codes, scales, 1001, 64, torch.bfloat16))
        torch.library.opcheck(space.dequantize_reduce.default, ([codes] * 2, [scales] * 2, 1001, 64))


def test_no_gradient_flows_through() -> None:
    codes, scales = ops.quantize_blocks(torch.ones(8, requires_grad=True))
    assert not scales.requires_grad and not ops.dequantize_blocks(codes, scales, (8,)).requires_grad


CODES, SCALES = torch.zeros(8, dtype=torch.int8), torch.zeros(1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.quantize_blocks(torch.ones(4).int()), TypeError, "input must be torch.float32"),
        (lambda: ops.quantize_blocks(torch.ones(4), bits=2), ValueError, "bits must be 4 or 8"),
        (lambda: ops.quantize_blocks(torch.ones(4), bits=4, block_size=3), ValueError, "block_size .* even for 4 bits"),
        (lambda: ops.quantize_blocks(torch.ones(4), block_size=0), ValueError, "block_size must be positive"),
        (lambda: ops.quantize_blocks(torch.ones(4), block_size=2.0), TypeError, "block_size must be an integer"),
        (lambda: ops.quantize_blocks(torch.ones(4), scale_dtype=torch.int8), TypeError, "scale_dtype must be"),
        (lambda: ops.dequantize_blocks(CODES.int(), SCALES, (8,)), TypeError, r"codes\[0\] must be torch.int8"),
        (lambda: ops.dequantize_blocks(CODES, SCALES, (9,)), ValueError, r"codes\[0\] must have shape \(9,\)"),
        (lambda: ops.dequantize_blocks(CODES, SCALES, (8,), block_size=4), ValueError, r"scales\[0\] must have shape"),
        (lambda: ops.dequantize_blocks(CODES, SCALES, (-8,)), ValueError, "negative size"),
        (lambda: ops.dequantize_blocks(CODES, SCALES, (8,), dtype=torch.int8), TypeError, "dtype must be"),
        (lambda: ops.dequantize_reduce([], [], (8,)), ValueError, "codes is empty"),
        (lambda: ops.dequantize_reduce([CODES], [], (8,)), ValueError, "scales has 0 tensors"),
        (lambda: ops.dequantize_reduce([CODES, CODES.byte()], [SCALES] * 2, (8,)), TypeError, r"codes\[1\]"),
    ],
)
def test_quantization_ops_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
