"""The feed-forward part behind its first matrix: activation(x + bias), and the second matrix.

    gelu, gelu_tanh    a = gelu(x + bias)
    swiglu             a = silu(gate) * up,   (gate, up) = the halves of x + bias

With `recompute` only x is kept for the backward, and a is made again from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zero_strategy import ops


def activated_linear(
    input: Tensor, bias: Tensor | None, weight: Tensor, activation: str, *, recompute: bool = False
) -> Tensor:
    """activation(input + bias) weight^T.

    Args:
        input: (..., inner), or (..., 2 * inner) for "swiglu".
        bias: One value per element of the last dimension, or None.
        weight: (output, inner), of the input's dtype.
        activation: "gelu", "gelu_tanh" or "swiglu".
        recompute: Keep no activation's output for the backward.

    Returns:
        (..., output).
    """
    if activation == "swiglu" and bias is not None:
        input, bias = input + bias, None
    if recompute:
        output: Tensor = _Recomputed.apply(input, bias, weight, activation)
        return output
    if activation == "swiglu":
        gate, up = input.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)
    return F.linear(ops.bias_gelu(input, bias, approximate=_form(activation)), weight)


def _form(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


class _Recomputed(torch.autograd.Function):
    """The activation's output lives inside the forward, and again inside the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(input, bias, weight)
        ctx.activation = activation
        return F.linear(_activated(input, bias, activation), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, bias, weight = ctx.saved_tensors
        dinput = dbias = dweight = None
        if ctx.needs_input_grad[2]:
            rows = gradient.flatten(0, -2)
            dweight = rows.t() @ _activated(input, bias, ctx.activation).flatten(0, -2)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            through = torch.matmul(gradient, weight)
            if ctx.activation == "swiglu":
                dinput = _swiglu_backward(through, input)
            else:
                dinput, dbias = torch.ops.zero_strategy.bias_gelu_backward(
                    through, input, bias, ctx.activation == "gelu_tanh"
                )
        return dinput, None if bias is None else dbias, dweight, None


def _activated(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = input.chunk(2, -1)
        return F.silu(gate) * up
    output: Tensor = torch.ops.zero_strategy.bias_gelu(input, bias, activation == "gelu_tanh")
    return output


def _swiglu_backward(gradient: Tensor, input: Tensor) -> Tensor:
    gate, up = input.chunk(2, -1)
    dgate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((dgate, gradient * F.silu(gate)), -1)
