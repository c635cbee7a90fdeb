"""Softmax over the last dimension with an additive mask, a causal limit and dropout, in one pass.

    t = input + mask                          (causal: only columns j <= i of query i; what lies beyond is not read)
    q = exp(t - max(t)) / sum(exp(t - max(t)))
    y = keep ? q * (1 / (1 - p)) : 0          (see `philox.py`)

    g = keep ? dy * (1 / (1 - p)) : 0,    dinput = q * (g - sum(g * q)),    dmask = dinput summed to the mask's shape

A row of which every element is masked (-infinity) gives zeros, and no gradient, where torch gives NaN. A NaN or
+infinity among the visible elements makes its row NaN. Without dropout only y is saved, with dropout only q (in the
input's dtype); the dropout mask is never stored. Arithmetic is float32 with float64 sums; the native kernels' exp is
within 1 ulp (cpp/functions.h), and q within a relative 4e-7 + 6e-8 |t - max(t)|, the second part from rounding the
difference. What is below exp(-87) is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops.arguments import check_probability, check_tensor
from zero_strategy.ops.dropout import drop
from zero_strategy.ops.library import define, differentiate
from zero_strategy.ops.philox import check_state


def masked_softmax_dropout(
    input: Tensor, mask: Tensor | None = None, *, causal: bool = False, p: float = 0.0, state: Tensor | None = None
) -> Tensor:
    """dropout(softmax(input + mask), p).

    Args:
        input: Scores, (..., queries, keys): float32, bfloat16 or float16.
        mask: Added; of any of these dtypes and a shape that broadcasts to the input's. A boolean mask is refused, since
            its meaning differs between libraries.
        causal: Query i sees keys 0 to i.
        p: Probability of dropping, from 0 to 1.
        state: `random_state(seed, offset)`; needed if p > 0.

    Returns:
        A tensor like the input.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_tensor("input", input)
    if input.dim() < (2 if causal else 1):
        raise ValueError(f"input must have at least {2 if causal else 1} dimensions, not {input.dim()}")
    if mask is not None:
        check_tensor("mask", mask, device=input.device)
        _check_broadcast(mask, input)
        mask = mask.contiguous()
    check_probability("p", p)
    if state is None:
        if p > 0:
            raise ValueError("state must be given if p > 0: random_state(seed, offset)")
        state = torch.zeros(2, dtype=torch.int64)
    check_state(state)
    output: Tensor = _forward(input.contiguous(), mask, state.contiguous(), causal, float(p))[0]
    return output


def _check_broadcast(mask: Tensor, input: Tensor) -> None:
    sizes = zip(reversed(mask.shape), reversed(input.shape), strict=False)
    if mask.dim() > input.dim() or any(own not in (1, other) for own, other in sizes):
        raise ValueError(f"mask's shape {tuple(mask.shape)} must broadcast to input's, {tuple(input.shape)}")


# ------------------------------------------------------------------------------------------------ references


@torch.no_grad()
def _forward_reference(
    input: Tensor, mask: Tensor | None, state: Tensor, causal: bool, p: float
) -> tuple[Tensor, Tensor]:
    scores = input.to(torch.float32)
    if mask is not None:
        scores = scores + mask.to(torch.float32)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    # A row without anything visible is a softmax of zeros, and set to zero afterwards.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    share = (scores - scores.amax(-1, keepdim=True)).exp() if scores.numel() else scores
    share = (share * (1 / share.double().sum(-1, keepdim=True)).float()).masked_fill(empty, 0.0)
    if causal:
        share = share.masked_fill(hidden, 0.0)
    result = drop(share, state, p).to(input.dtype)
    return result, share.to(input.dtype) if p > 0 else input.new_empty(0)


@torch.no_grad()
def _backward_reference(gradient: Tensor, probabilities: Tensor, state: Tensor, p: float) -> Tensor:
    share, through = probabilities.to(torch.float32), drop(gradient.to(torch.float32), state, p)
    shift = (share * through).double().sum(-1, keepdim=True).float()
    return (share * (through - shift)).to(gradient.dtype)


def _forward_fake(input: Tensor, mask: Tensor | None, state: Tensor, causal: bool, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(input) if p > 0 else input.new_empty(0)


def _backward_fake(gradient: Tensor, probabilities: Tensor, state: Tensor, p: float) -> Tensor:
    return torch.empty_like(gradient)


_forward = define(
    "masked_softmax_dropout(Tensor input, Tensor? mask, Tensor state, bool causal, float p) -> (Tensor, Tensor)",
    _forward_reference,
    _forward_fake,
)
_backward = define(
    "masked_softmax_dropout_backward(Tensor gradient, Tensor probabilities, Tensor state, float p) -> Tensor",
    _backward_reference,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, state, _, ctx.p = inputs
    result, probabilities = output
    ctx.mark_non_differentiable(probabilities)
    ctx.save_for_backward(probabilities if ctx.p > 0 else result, state)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)


def _derivative(ctx: Any, gradient: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
    probabilities, state = ctx.saved_tensors
    dinput = _backward(gradient.contiguous(), probabilities, state, ctx.p)
    dmask = None
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.mask
        dmask = dinput.to(torch.float32).sum_to_size(shape).to(dtype)
    return dinput, dmask, None, None, None


differentiate(_forward, _setup, _derivative, _backward)
