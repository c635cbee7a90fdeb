"""Layer norm and RMS norm against float64, and the invertible form against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, at_every_thread_count, need_native, normal, same_bits
from zero_strategy import ops
from zero_strategy.ops import fused_layers as n

COLUMNS = st.sampled_from([1, 2, 15, 16, 17, 100, 1024, 1025, 2500])
ROWS = st.sampled_from([0, 1, 3, 33, 70])
ERROR = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def arguments(rows: int, columns: int, dtype: torch.dtype, parameters: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Input, weight, bias and the output's gradient; no weight is near to zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(columns, generator=generator) + 0.5
    bias = torch.randn(columns, generator=generator)
    return [
        normal(generator, (rows, columns), dtype), weight.to(parameters), bias.to(parameters),
        normal(generator, (rows, columns), dtype),
    ]  # fmt: skip


def both(call: Callable[..., Any], *values: Any) -> list[Any]:
    """Results of the native kernel and the reference."""
    reference = {n._forward: n._forward_reference, n._backward: n._backward_reference}[call]
    return [call(*values), reference(*values)]


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    rows=ROWS, columns=COLUMNS, dtype=st.sampled_from(FLOATS), parameters=st.sampled_from(FLOATS),
    affine=st.sampled_from(["", "weight", "bias", "weight bias"]), centered=st.booleans(), invertible=st.booleans(),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_normalization_ops_kernel_and_reference_agree(
    rows: int, columns: int, dtype: torch.dtype, parameters: torch.dtype, affine: str, centered: bool,
    invertible: bool, seed: int,
) -> None:  # fmt: skip
    need_native()
    x, weight, bias, gradient = arguments(rows, columns, dtype, parameters, seed)
    w, b = weight if "weight" in affine else None, bias if "bias" in affine else None
    found = both(n._forward, x, w, b, columns, 1e-5, centered, invertible)
    tolerance = {"rtol": ERROR[dtype] / 2, "atol": ERROR[dtype] / 2}
    torch.testing.assert_close(*found, **tolerance)
    output, mean, rstd = found[0]
    saved = output if invertible else x
    found = both(n._backward, gradient, saved, mean, rstd, w, b, columns, centered, invertible)
    scale = 1 + float(rstd.max()) if rows else 1.0
    tolerance = {"rtol": ERROR[parameters] + ERROR[dtype], "atol": scale * (ERROR[dtype] + ERROR[parameters])}
    torch.testing.assert_close(*found, **tolerance)


@pytest.mark.parametrize("invertible", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_normalization_ops_values_and_gradients_follow_float64(
    dtype: torch.dtype, centered: bool, invertible: bool
) -> None:
    need_native()
    leaves = [tensor.requires_grad_() for tensor in arguments(40, 1300, dtype, torch.float32)[:3]]
    gradient = arguments(40, 1300, dtype, dtype, 1)[3]
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    functional = torch.nn.functional
    if centered:
        ours = ops.layer_norm(leaves[0], 1300, leaves[1], leaves[2], invertible=invertible)
        exact = functional.layer_norm(wide[0], (1300,), wide[1], wide[2])
    else:
        leaves.pop(), wide.pop()
        ours = ops.rms_norm(leaves[0], (1300,), leaves[1], 1e-5, invertible=invertible)
        exact = functional.rms_norm(wide[0], (1300,), wide[1], 1e-5)
    results = zip(
        [ours, *torch.autograd.grad(ours, leaves, gradient)],
        [exact, *torch.autograd.grad(exact, wide, gradient.double())],
        strict=True,
    )
    assert ours.dtype == dtype
    for result, truth in results:
        # a sum over rows is as exact as its largest term; what the invertible form takes from y is rounded once more
        atol = ERROR[dtype] * (4 if invertible else 1)
        torch.testing.assert_close(result.double(), truth, rtol=ERROR[dtype], atol=atol)


def test_a_large_mean_costs_no_accuracy() -> None:
    need_native()
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 0.01 + 100
    exact = torch.nn.functional.layer_norm(x.double(), (1000,))
    assert (ops.layer_norm(x, 1000) - exact).abs().max() < 2e-3  # the input's rounding alone is 4e-4 of a deviation
    assert ops.layer_norm(torch.full((3, 7), 0.1), 7).tolist() == [[0.0] * 7] * 3
    # the mean lies between two float32, and the variance is about the mean itself
    rstd = n._forward(torch.tensor([[16777216.0, 16777218.0]]), None, None, 2, 1e-5, True, False)[2]
    assert float(rstd) == pytest.approx(1 / (1 + 1e-5) ** 0.5, rel=1e-6)


def test_invertible_saves_the_output_and_not_the_input() -> None:
    need_native()
    x, weight, bias, _ = arguments(4, 32, torch.float32, torch.float32)
    places: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        places.add(tensor.data_ptr())
        return tensor

    for invertible in (False, True):
        places.clear()
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = ops.layer_norm(leaf, 32, weight, bias, invertible=invertible)
        assert (output.data_ptr() in places, leaf.data_ptr() in places) == (invertible, not invertible)


@pytest.mark.parametrize("native", [False, True])
def test_normalization_ops_weight_near_zero_is_refused(native: bool) -> None:
    if native:
        need_native()
    x, weight, bias, _ = arguments(4, 32, torch.float32, torch.float32)
    call = n._forward if native else n._forward_reference
    weight[7], weight[9] = -1 / 1024, float("nan")
    call(x, weight, bias, 32, 1e-5, True, True)
    weight[5] = -1e-4
    call(x, weight, bias, 32, 1e-5, True, False)
    with pytest.raises(RuntimeError, match=r"weight\[5\] is -0.0001, too near to zero for invertible=True"):
        call(x, weight, bias, 32, 1e-5, True, True)


def test_a_bad_element_stays_in_its_row() -> None:
    need_native()
    x, weight, bias, _ = arguments(3, 50, torch.float32, torch.float32)
    x[1, 3] = float("inf")
    output = ops.layer_norm(x, 50, weight, bias)
    assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


def test_normalization_ops_results_do_not_depend_on_threads() -> None:
    need_native()
    x, weight, bias, gradient = arguments(300, 777, torch.bfloat16, torch.float32)

    def run() -> list[Tensor]:
        output, mean, rstd = n._forward(x, weight, bias, 777, 1e-5, True, False)
        return [output, mean, rstd, *n._backward(gradient, x, mean, rstd, weight, bias, 777, True, False)]

    first, *others = at_every_thread_count(run)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("invertible", [False, True])
def test_normalization_ops_pass_opcheck(invertible: bool) -> None:
    need_native()
    x, weight, bias, _ = arguments(5, 33, torch.float32, torch.float32)
    for w, b in ((weight.requires_grad_(), bias.requires_grad_()), (weight, None), (None, None)):
        for centered in (False, True):
            values = (x.clone().requires_grad_(), w, b, 33, 1e-5, centered, invertible)
            torch.library.opcheck(torch.ops.zero_strategy.norm_forward.default, values)


def test_normalization_ops_compiles() -> None:
    need_native()
    x, weight, bias, _ = (tensor.requires_grad_() for tensor in arguments(5, 33, torch.float32, torch.float32))

    def loss(x: Tensor) -> Tensor:
        return ops.layer_norm(x, 33, weight, bias, invertible=True).square().sum()

    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(*(torch.autograd.grad(call(x), x)[0] for call in (loss, traced)))


def test_normalization_ops_second_derivative_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(ops.layer_norm(x, 8).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"norm_forward.* has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.layer_norm(torch.ones(2, 3).double(), 3), TypeError, "input must be torch.float32"),
        (lambda: ops.layer_norm([1.0], 1), TypeError, "input must be a tensor, not list"),
        (lambda: ops.layer_norm(torch.ones(2, 3), 2), ValueError, r"normalized_shape \(2,\)"),
        (lambda: ops.layer_norm(torch.ones(2, 0), 0), ValueError, "normalized_shape .* no elements"),
        (lambda: ops.layer_norm(torch.ones(2, 3), 3, torch.ones(2)), ValueError, r"weight must have shape \(3,\)"),
        (lambda: ops.layer_norm(torch.ones(2, 3), 3, bias=torch.ones(3).int()), TypeError, "bias must be"),
        (lambda: ops.layer_norm(torch.ones(2, 3), 3, torch.ones(3, device="meta")), ValueError, "weight is on meta"),
        (lambda: ops.rms_norm(torch.ones(2, 3), 3, eps=-1.0), ValueError, "eps must not be negative"),
        (lambda: ops.rms_norm(torch.ones(2, 3), 3, eps="1"), TypeError, "eps must be a number"),
    ],
)
def test_normalization_ops_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
