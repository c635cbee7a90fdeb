"""residual + dropout(x + bias) in one pass, with no mask stored: the backward makes it anew (see `philox.py`).

    y = residual + (keep ? (x + bias) * (1 / (1 - p)) : 0)
    dresidual = dy,    dx = keep ? dy * (1 / (1 - p)) : 0,    dbias = sum over rows of dx

An element is dropped if its random word is below p * 2^32. What is dropped is 0 whatever it was, infinite and NaN
included. Arithmetic is float32, one rounding per operation; kernels and reference give the same bits, but for the order
of the bias gradient's float64 sum, which depends on the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops.arguments import check_probability, check_tensor
from zero_strategy.ops.fused_activation import check_bias, sum_of_rows
from zero_strategy.ops.library import define, differentiate
from zero_strategy.ops.philox import check_state, keep_scale, kept


def bias_dropout_residual(input: Tensor, bias: Tensor | None, residual: Tensor, p: float, state: Tensor) -> Tensor:
    """residual + dropout(input + bias, p).

    Args:
        input: float32, bfloat16 or float16.
        bias: One value per element of the last dimension, of any of these dtypes; or None.
        residual: Of the input's shape and any of these dtypes.
        p: Probability of dropping, from 0 (evaluation) to 1.
        state: `random_state(seed, offset)`; the same one gives the same mask.

    Returns:
        A tensor like the residual.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_bias(input, bias)
    check_tensor("residual", residual, shape=input.shape, device=input.device)
    check_probability("p", p)
    check_state(state)
    bias = None if bias is None else bias.contiguous()
    output: Tensor = _forward(input.contiguous(), bias, residual.contiguous(), state.contiguous(), float(p))
    return output


# ------------------------------------------------------------------------------------------------ references


def drop(values: Tensor, state: Tensor, p: float) -> Tensor:
    """Dropout of float32 values."""
    return torch.where(kept(state, p, values), values * keep_scale(p), 0.0) if p > 0 else values


@torch.no_grad()
def _forward_reference(input: Tensor, bias: Tensor | None, residual: Tensor, state: Tensor, p: float) -> Tensor:
    wide = input.to(torch.float32)
    dropped = drop(wide if bias is None else wide + bias.to(torch.float32), state, p)
    return (residual.to(torch.float32) + dropped).to(residual.dtype)


@torch.no_grad()
def _backward_reference(
    gradient: Tensor, bias: Tensor | None, state: Tensor, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    result = drop(gradient.to(torch.float32), state, p)
    parameter = sum_of_rows(result, bias)
    # a result may not be an argument
    return result.to(dtype, copy=True), parameter if bias is not None else parameter.to(gradient.dtype)


def _forward_fake(input: Tensor, bias: Tensor | None, residual: Tensor, state: Tensor, p: float) -> Tensor:
    return torch.empty_like(residual)


def _backward_fake(
    gradient: Tensor, bias: Tensor | None, state: Tensor, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    parameter = gradient.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(gradient, dtype=dtype), parameter


_forward = define(
    "bias_dropout_residual(Tensor input, Tensor? bias, Tensor residual, Tensor state, float p) -> Tensor",
    _forward_reference,
    _forward_fake,
)
_backward = define(
    "bias_dropout_residual_backward(Tensor gradient, Tensor? bias, Tensor state, float p, ScalarType dtype) "
    "-> (Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, _, state, ctx.p = inputs
    ctx.dtype = input.dtype
    ctx.save_for_backward(bias, state)


def _derivative(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    bias, state = ctx.saved_tensors
    needs_input, needs_bias, *_ = ctx.needs_input_grad
    if not needs_input and not needs_bias:
        return None, None, gradient, None, None
    bias = bias if needs_bias else None
    dx, dbias = _backward(gradient.contiguous(), bias, state, ctx.p, ctx.dtype)
    return dx, None if bias is None else dbias, gradient, None, None


differentiate(_forward, _setup, _derivative, _backward)
