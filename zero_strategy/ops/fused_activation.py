"""gelu(x + bias) in one pass, forward and backward; only x and the bias are saved.

    approximate="none"    y = x Phi(x), Phi the normal distribution
    approximate="tanh"    y = x (1 + tanh(u)) / 2,  u = sqrt(2 / pi) (x + 0.044715 x^3)

Arithmetic is float32 whatever the dtypes. The native kernels use exp and Phi of their own (cpp/functions.h), made of
IEEE operations only, so that every processor and any place in a buffer gives the same bits; the lower tail, lost to
cancellation in torch's formula, is kept. Against float64, y is within 4 ulp for x >= -1 in both forms; below that it is
within 7 ulp with "none" and a relative 2e-5 with "tanh", and 0 where it is below 1e-36. dy/dx is within 3e-7. The
bias's gradient is a float64 sum in an order that depends on the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops.arguments import check_tensor
from zero_strategy.ops.library import define, differentiate

FORMS = ("none", "tanh")


def bias_gelu(input: Tensor, bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """gelu(input + bias).

    Args:
        input: float32, bfloat16 or float16, with at least one dimension.
        bias: One value per element of the last dimension, of any of these dtypes; or None.
        approximate: "none" or "tanh", as in `torch.nn.functional.gelu`.

    Returns:
        A tensor like the input.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_bias(input, bias)
    if approximate not in FORMS:
        raise ValueError(f"approximate must be {' or '.join(map(repr, FORMS))}, not {approximate!r}")
    output: Tensor = _forward(input.contiguous(), None if bias is None else bias.contiguous(), approximate == "tanh")
    return output


def check_bias(input: Tensor, bias: Tensor | None) -> None:
    """An input, and a bias for its last dimension.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_tensor("input", input)
    if input.dim() == 0:
        raise ValueError("input must have at least one dimension")
    if bias is not None:
        check_tensor("bias", bias, shape=input.shape[-1:], device=input.device)


# ------------------------------------------------------------------------------------------------ references


def _biased(input: Tensor, bias: Tensor | None) -> Tensor:
    wide = input.to(torch.float32)
    return wide if bias is None else wide + bias.to(torch.float32)


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def sum_of_rows(values: Tensor, bias: Tensor | None) -> Tensor:
    """A bias's gradient from that of what it was added to; empty without a bias."""
    if bias is None:
        return values.new_empty(0)
    return values.double().reshape(-1, bias.numel()).sum(0).float().to(bias.dtype) if values.numel() else bias * 0


@torch.no_grad()
def _forward_reference(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return torch.nn.functional.gelu(_biased(input, bias), approximate=_form(tanh)).to(input.dtype)


@torch.no_grad()
def _backward_reference(gradient: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    biased = _biased(input, bias)
    result = torch.ops.aten.gelu_backward(gradient.to(torch.float32), biased, approximate=_form(tanh))
    parameter = sum_of_rows(result, bias)
    return result.to(input.dtype), parameter if bias is not None else parameter.to(input.dtype)


def _forward_fake(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return torch.empty_like(input)


def _backward_fake(gradient: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty(0) if bias is None else torch.empty_like(bias)


_forward = define("bias_gelu(Tensor input, Tensor? bias, bool tanh) -> Tensor", _forward_reference, _forward_fake)
_backward = define(
    "bias_gelu_backward(Tensor gradient, Tensor input, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, ctx.tanh = inputs
    ctx.save_for_backward(input, bias)


def _derivative(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, bias = ctx.saved_tensors
    dx, dbias = _backward(gradient.contiguous(), input, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


differentiate(_forward, _setup, _derivative, _backward)
