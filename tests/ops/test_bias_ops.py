"""Bias with gelu, and bias with dropout and a residual."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, at_every_thread_count, need_native, normal, same_bits, spread
from zero_strategy import ops
from zero_strategy.ops import fused_layers as d
from zero_strategy.ops import fused_layers as g
from zero_strategy.ops.fused_layers import kept, philox_words

DTYPES = st.sampled_from(FLOATS)
SHAPES = st.sampled_from([(0, 5), (3, 0), (1,), (7, 1), (5, 33), (2, 3, 1025), (40, 100)])
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def made(seed: int, shape: tuple[int, ...], dtype: torch.dtype, wild: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if wild:
        return spread(generator, torch.Size(shape).numel(), dtype, wild=True).view(shape)
    return normal(generator, shape, dtype) * 2


@hypothesis.given(
    shape=SHAPES, dtype=DTYPES, parameter=st.sampled_from((None, *FLOATS)), tanh=st.booleans(), wild=st.booleans(),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_gelu_kernel_and_reference_agree(
    shape: tuple[int, ...], dtype: torch.dtype, parameter: Any, tanh: bool, wild: bool, seed: int
) -> None:
    need_native()
    x, gradient = made(seed, shape, dtype, wild), made(seed + 1, shape, dtype)
    bias = None if parameter is None else made(seed + 2, shape[-1:], parameter)
    x = x.clamp(-1e4, 1e4)  # torch's own is NaN for infinite input, or not, by form and processor; NaN stays here
    near = {"rtol": ERROR[dtype], "atol": ERROR[dtype] * 5, "equal_nan": True}
    torch.testing.assert_close(g._gelu_forward(x, bias, tanh), g._gelu_forward_reference(x, bias, tanh), **near)
    x = x.nan_to_num(0.0)
    ours, theirs = g._gelu_backward(gradient, x, bias, tanh), g._gelu_backward_reference(gradient, x, bias, tanh)
    torch.testing.assert_close(ours[0], theirs[0], rtol=ERROR[dtype] * 2, atol=ERROR[dtype] * 10)
    error = ERROR[parameter or dtype]
    torch.testing.assert_close(ours[1], theirs[1], rtol=error, atol=error * 20)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gelu_follows_float64(dtype: torch.dtype, approximate: str) -> None:
    need_native()
    leaves = [made(0, (50, 300), dtype).requires_grad_(), made(1, (300,), torch.float32).requires_grad_()]
    gradient = made(2, (50, 300), dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    ours = ops.bias_gelu(*leaves, approximate=approximate)
    exact = torch.nn.functional.gelu(wide[0] + wide[1], approximate=approximate)
    results = [ours, *torch.autograd.grad(ours, leaves, gradient)]
    truths = [exact, *torch.autograd.grad(exact, wide, gradient.double())]
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=ERROR[dtype], atol=ERROR[dtype] * 5)


@hypothesis.given(
    shape=SHAPES, dtype=DTYPES, residual_type=DTYPES, parameter=st.sampled_from((None, *FLOATS)),
    p=st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.999, 1.0]), wild=st.booleans(), seed=st.integers(-(2**63), 2**64 - 1),
)  # fmt: skip
def test_dropout_kernel_and_reference_give_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, residual_type: torch.dtype, parameter: Any, p: float, wild: bool,
    seed: int,
) -> None:  # fmt: skip
    need_native()
    x, residual = made(seed % 97, shape, dtype, wild), made(seed % 89, shape, residual_type)
    bias = None if parameter is None else made(3, shape[-1:], parameter)
    state = ops.random_state(seed, seed // 3)
    out, reference = (call(x, bias, residual, state, p) for call in (d._dropout_forward, d._dropout_forward_reference))
    assert same_bits(out, reference)
    both = (d._dropout_backward, d._dropout_backward_reference)
    ours, theirs = (call(residual, bias, state, p, dtype) for call in both)
    assert same_bits(ours[0], theirs[0])
    error = ERROR[parameter or residual_type]
    torch.testing.assert_close(ours[1], theirs[1], rtol=error, atol=error)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_keeps_its_mask(p: float) -> None:
    need_native()
    x, bias, residual = (made(0, (33, 77), torch.float32), made(1, (77,), torch.float32), made(2, (33, 77), FLOATS[0]))
    leaves = [tensor.double().float().requires_grad_() for tensor in (x, bias, residual)]
    state = ops.random_state(5, 6)
    output = ops.bias_dropout_residual(leaves[0], leaves[1], leaves[2], p, state)
    keep = kept(state, p, x) if p else torch.ones_like(x, dtype=torch.bool)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact = wide[2] + torch.where(keep, (wide[0] + wide[1]) / ((1 - p) or 1), 0.0)
    if p == 1:
        assert torch.equal(output, residual)
        return
    gradient = made(4, (33, 77), torch.float32)
    ours = [output, *torch.autograd.grad(output, leaves, gradient)]
    truths = [exact, *torch.autograd.grad(exact, wide, gradient.double())]
    for result, truth in zip(ours, truths, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-6, atol=1e-6)


def test_dropout_saves_no_mask() -> None:
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    leaf = made(0, (50, 60), torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ops.bias_dropout_residual(leaf, torch.ones(60), leaf, 0.5, ops.random_state(1))
    assert sorted(sizes) == [2, 60]


def test_dropout_is_even_and_differs_by_offset() -> None:
    ones = torch.ones(1_000_000)
    masks = [kept(ops.random_state(7, offset), 0.3, ones) for offset in (0, 1)]
    for mask in masks:
        assert abs(mask.double().mean() - 0.7) < 0.002  # 4 deviations
    assert abs((masks[0] == masks[1]).double().mean() - 0.58) < 0.002


def test_random_words_of_a_large_index() -> None:
    words = philox_words(ops.random_state(1, 2), 11)
    assert torch.equal(words[:7], philox_words(ops.random_state(1, 2), 7))
    assert words.min() >= 0 and words.max() < 2**32


def test_bias_ops_results_do_not_depend_on_threads() -> None:
    need_native()
    x, bias, gradient = made(0, (333, 500), FLOATS[1]), made(1, (500,), FLOATS[0]), made(2, (333, 500), FLOATS[1])
    state = ops.random_state(3)

    def run() -> list[Tensor]:
        found = [g._gelu_forward(x, bias, True), *g._gelu_backward(gradient, x, bias, False)]
        found.append(d._dropout_forward(x, bias, gradient, state, 0.2))
        found += d._dropout_backward(gradient, bias, state, 0.2, x.dtype)
        return found

    first, *others = at_every_thread_count(run)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_bias_ops_pass_opcheck() -> None:
    need_native()
    x, residual = (made(seed, (5, 33), torch.float32).requires_grad_() for seed in (0, 1))
    space = torch.ops.zero_strategy
    for bias in (made(2, (33,), torch.float32).requires_grad_(), None):
        torch.library.opcheck(space.bias_gelu.default, (x, bias, False))
        torch.library.opcheck(space.bias_dropout_residual.default, (x, bias, residual, ops.random_state(1), 0.5))


def test_a_compiled_graph_takes_another_seed() -> None:
    need_native()
    x, bias = made(0, (5, 33), torch.float32), made(1, (33,), torch.float32)

    def step(x: Tensor, state: Tensor) -> Tensor:
        return ops.bias_dropout_residual(ops.bias_gelu(x, bias), None, x, 0.5, state)

    with torch._dynamo.config.patch(error_on_recompile=True):
        traced = torch.compile(step, backend="aot_eager", fullgraph=True)
        for seed in (1, 2):
            leaf = x.clone().requires_grad_()
            state = ops.random_state(seed)
            gradients = [torch.autograd.grad(call(leaf, state).sum(), leaf)[0] for call in (step, traced)]
            assert torch.equal(*gradients)


def test_strided_input_is_taken() -> None:
    x, bias = made(0, (33, 5), torch.float32), made(1, (33,), torch.float32)
    assert torch.equal(ops.bias_gelu(x.t(), bias), ops.bias_gelu(x.t().contiguous(), bias))


ONES = torch.ones(2, 3)
STATE = ops.random_state(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.bias_gelu(ONES.int(), None), TypeError, "input must be torch.float32"),
        (lambda: ops.bias_gelu(torch.tensor(1.0), None), ValueError, "input must have at least one dimension"),
        (lambda: ops.bias_gelu(ONES, torch.ones(2)), ValueError, r"bias must have shape \(3,\)"),
        (lambda: ops.bias_gelu(ONES, None, approximate="erf"), ValueError, "approximate must be 'none' or 'tanh'"),
        (lambda: ops.bias_dropout_residual(ONES, None, ONES.t(), 0.1, STATE), ValueError, "residual must have shape"),
        (lambda: ops.bias_dropout_residual(ONES, None, ONES, 1.5, STATE), ValueError, "p must be between 0 and 1"),
        (lambda: ops.bias_dropout_residual(ONES, None, ONES, "x", STATE), TypeError, "p must be a number"),
        (lambda: ops.bias_dropout_residual(ONES, None, ONES, 0.1, STATE.int()), TypeError, "state must be torch.int64"),
        (lambda: ops.bias_dropout_residual(ONES, None, ONES, 0.1, STATE[:1]), ValueError, "state must have shape"),
        (lambda: ops.random_state(0.5), TypeError, "seed must be an integer"),
        (lambda: ops.random_state(0, 2**64), ValueError, "offset must fit into 64 bits"),
    ],
)
def test_bias_ops_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
