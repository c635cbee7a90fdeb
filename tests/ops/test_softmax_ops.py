"""Softmax with mask, causal limit and dropout."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, at_every_thread_count, need_native, normal, same_bits
from zero_strategy import ops
from zero_strategy.ops import fused_layers as s
from zero_strategy.ops.fused_layers import kept

SHAPES = st.sampled_from([(0, 3, 4), (3, 0), (1, 1), (4, 7), (2, 3, 17, 16), (3, 5, 1030), (33, 20), (2, 2500)])
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def scores(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return normal(torch.Generator().manual_seed(seed), shape, dtype) * 4


def mask_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype, ones: int) -> Tensor:
    """Normal numbers and -infinity; bit k of `ones`: dimension k is 1; and the leading ones are dropped."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 if ones >> dim & 1 else size for dim, size in enumerate(shape)]
    while len(sizes) > 1 and sizes[0] == 1:
        del sizes[0]
    mask = normal(generator, sizes, dtype)
    return mask.masked_fill(torch.rand(sizes, generator=generator) < 0.4, -math.inf)


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    shape=SHAPES, dtype=st.sampled_from(FLOATS), mask_type=st.sampled_from((None, *FLOATS)), ones=st.integers(0, 15),
    causal=st.booleans(), p=st.sampled_from([0.0, 0.2, 1.0]), bad=st.sampled_from([None, math.inf, math.nan]),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_softmax_ops_kernel_and_reference_agree(
    shape: tuple[int, ...], dtype: torch.dtype, mask_type: Any, ones: int, causal: bool, p: float, bad: float | None,
    seed: int,
) -> None:  # fmt: skip
    need_native()
    x, gradient = scores(seed, shape, dtype), scores(seed + 1, shape, dtype)
    if bad is not None and x.numel():
        x.view(-1)[seed % x.numel()] = bad
    mask = None if mask_type is None else mask_of(seed, shape, mask_type, ones)
    state = ops.random_state(seed, 1)
    near = {"rtol": ERROR[dtype] * 4, "atol": ERROR[dtype], "equal_nan": True}
    found = [call(x, mask, state, causal, p) for call in (s._softmax_forward, s._softmax_forward_reference)]
    torch.testing.assert_close(*found, **near)
    probabilities = found[0][1] if p else found[0][0]
    found = [call(gradient, probabilities, state, p) for call in (s._softmax_backward, s._softmax_backward_reference)]
    torch.testing.assert_close(*found, **{**near, "atol": ERROR[dtype] * 10})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_ops_values_and_gradients_follow_float64(dtype: torch.dtype, p: float, causal: bool) -> None:
    need_native()
    shape = (2, 3, 40, 70)
    x = scores(0, shape, dtype).requires_grad_()
    mask = scores(1, (3, 1, 70), torch.float32).requires_grad_()
    gradient, state = scores(2, shape, dtype), ops.random_state(9)
    ours = ops.masked_softmax_dropout(x, mask, causal=causal, p=p, state=state)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, mask)]
    total = wide[0] + wide[1]
    if causal:
        total = total.masked_fill(torch.ones(40, 70, dtype=torch.bool).triu(1), -math.inf)
    exact = total.softmax(-1)
    if p:
        exact = exact * kept(state, p, x) / (1 - p)
    results = [ours, *torch.autograd.grad(ours, (x, mask), gradient)]
    truths = [exact, *torch.autograd.grad(exact, wide, gradient.double())]
    for result, truth, atol in zip(results, truths, (1, 10, 200), strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=ERROR[dtype] * 4, atol=ERROR[dtype] * atol)


def test_probabilities_are_exact_to_a_few_ulp() -> None:
    need_native()
    x = torch.linspace(-80, 0, 100_000)[torch.randperm(100_000)].view(100, 1000)
    ours, exact = ops.masked_softmax_dropout(x), x.double().softmax(-1)
    distance = (x - x.amax(-1, keepdim=True)).abs()
    assert (((ours - exact) / exact).abs() <= 4e-7 + 6e-8 * distance).all()


def test_a_row_without_anything_visible_is_zero() -> None:
    need_native()
    x = scores(0, (4, 6), torch.float32).requires_grad_()
    mask = torch.zeros(4, 6)
    mask[1], mask[2, 1:] = -math.inf, -math.inf
    for p in (0.0, 0.5):
        output = ops.masked_softmax_dropout(x, mask, p=p, state=ops.random_state(1))
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        assert not output[1].any() and not gradient[1].any() and output.isfinite().all() and gradient.isfinite().all()
    assert ops.masked_softmax_dropout(x, mask)[2].tolist() == [1, 0, 0, 0, 0, 0]


def test_what_a_causal_limit_hides_is_not_read() -> None:
    need_native()
    x = scores(0, (2, 5, 5), torch.float32)
    clean = ops.masked_softmax_dropout(x, causal=True)
    x[:, torch.ones(5, 5, dtype=torch.bool).triu(1)] = math.nan
    assert torch.equal(ops.masked_softmax_dropout(x, causal=True), clean)
    assert clean[0, 0].tolist() == [1, 0, 0, 0, 0]


def test_bad_numbers_stay_in_their_row() -> None:
    need_native()
    x = torch.zeros(4, 40)
    x[0, 3], x[1, 39], x[2] = math.nan, math.inf, -math.inf
    x[2, 5] = math.nan
    output = ops.masked_softmax_dropout(x)
    assert output[0].isnan().all() and output[1].isnan().all() and output[2].isnan().all()
    assert torch.equal(output[3], torch.full((40,), 1 / 40))


def test_softmax_ops_results_do_not_depend_on_threads() -> None:
    need_native()
    x, gradient, state = scores(0, (4, 300, 333), FLOATS[1]), scores(1, (4, 300, 333), FLOATS[1]), ops.random_state(2)

    def run() -> list[Tensor]:
        output, probabilities = s._softmax_forward(x, None, state, True, 0.1)
        return [output, probabilities, s._softmax_backward(gradient, probabilities, state, 0.1)]

    first, *others = at_every_thread_count(run)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_softmax_ops_pass_opcheck() -> None:
    need_native()
    x, mask = scores(0, (2, 4, 5), torch.float32), scores(1, (4, 5), torch.float32)
    for p, m in ((0.0, mask), (0.4, None)):
        values = (x.clone().requires_grad_(), m, ops.random_state(3), True, p)
        torch.library.opcheck(torch.ops.zero_strategy.masked_softmax_dropout.default, values)


def test_softmax_ops_compiles() -> None:
    need_native()
    x, mask = scores(0, (2, 4, 5), torch.float32).requires_grad_(), scores(1, (4, 5), torch.float32).requires_grad_()

    def loss(x: Tensor, mask: Tensor, state: Tensor) -> Tensor:
        return ops.masked_softmax_dropout(x, mask, causal=True, p=0.5, state=state).square().sum()

    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    state = ops.random_state(3)
    found = [torch.autograd.grad(call(x, mask, state), (x, mask)) for call in (loss, traced)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.masked_softmax_dropout(X.bool()), TypeError, "input must be torch.float32"),
        (lambda: ops.masked_softmax_dropout(torch.tensor(1.0)), ValueError, "input must have at least 1"),
        (lambda: ops.masked_softmax_dropout(X[0], causal=True), ValueError, "input must have at least 2"),
        (lambda: ops.masked_softmax_dropout(X, X.bool()), TypeError, "mask must be torch.float32"),
        (lambda: ops.masked_softmax_dropout(X, torch.ones(2)), ValueError, "mask's shape .* must broadcast"),
        (lambda: ops.masked_softmax_dropout(X, torch.ones(1, 2, 3)), ValueError, "mask's shape .* must broadcast"),
        (lambda: ops.masked_softmax_dropout(X, p=0.5), ValueError, "state must be given"),
        (lambda: ops.masked_softmax_dropout(X, p=-0.5), ValueError, "p must be between 0 and 1"),
        (lambda: ops.masked_softmax_dropout(X, p=0.5, state=7), TypeError, "state must be a tensor, not int"),
    ],
)
def test_softmax_ops_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
