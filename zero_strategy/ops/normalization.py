"""Layer norm and RMS norm, with a form whose backward needs the output instead of the input.

For every row x of `columns` elements (the last dimensions, `normalized_shape`):

    mean  = sum(x) / columns, or 0 in RMS norm
    rstd  = 1 / sqrt(sum((x - mean)^2) / columns + eps)
    x_hat = (x - mean) * rstd
    y     = x_hat * weight + bias

    g          = dy * weight
    dx         = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd        (RMS norm: without mean(g))
    dweight    = sum over rows of dy * x_hat,    dbias = sum over rows of dy

Sums over a row are float64 in a fixed order, in one pass over it and about the mean before that is rounded; mean and
rstd are kept as float32. dweight and dbias are float64 sums, too, in which the CPU kernels add up four rows at a time
in float32. The rest is float32, one rounding per operation, whatever the dtypes of input, weight and bias: results
are the same for any number of threads and on every processor.

`invertible=True` saves y, which the next layer's backward needs anyway, and not x: the backward takes
x_hat = (y - bias) / weight. A rounding error of y shows there divided by the weight, so x_hat is off by about
eps(dtype) * |y / weight|: fine while |bias| is not much larger than |weight|. A weight below 1/1024 is refused in the
forward, by its index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops.library import check_tensor, define, differentiate

SMALLEST_WEIGHT = 1 / 1024


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    invertible: bool = False,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`.

    Args:
        input: float32, bfloat16 or float16.
        normalized_shape: The last dimensions.
        weight: Of that shape and any of these dtypes, or None.
        bias: Likewise.
        eps: Added to the variance.
        invertible: Save the output instead of the input.

    Returns:
        A tensor like the input.

    Raises:
        TypeError, ValueError: Naming the argument.
        RuntimeError: If `invertible`, and a weight's magnitude is below 1/1024.
    """
    columns = _check(input, normalized_shape, weight, bias, eps)
    return _apply(input, weight, bias, columns, eps, True, invertible)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    invertible: bool = False,
) -> Tensor:
    """As `torch.nn.functional.rms_norm`; `eps` defaults to the input dtype's. Otherwise as `layer_norm`."""
    check_tensor("input", input)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    columns = _check(input, normalized_shape, weight, None, eps)
    return _apply(input, weight, None, columns, eps, False, invertible)


def _check(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> int:
    check_tensor("input", input)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"input's last dimensions must be normalized_shape {shape}; its shape is {tuple(input.shape)}")
    columns = 1
    for size in shape:
        columns *= size
    if columns == 0:
        raise ValueError(f"normalized_shape {shape} has no elements")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_tensor(name, tensor, shape=shape, device=input.device)
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps must be a number, not {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, it is {eps}")
    return columns


def _apply(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: int,
    eps: float,
    centered: bool,
    invertible: bool,
) -> Tensor:
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    output: Tensor = _forward(input.contiguous(), weight, bias, columns, float(eps), centered, invertible)[0]
    return output


# ------------------------------------------------------------------------------------------------ references


def _row(values: Tensor) -> Tensor:
    return values.to(torch.float32).reshape(-1)


@torch.no_grad()
def _forward_reference(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, centered: bool,
    invertible: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if invertible and weight is not None:
        small = (weight.abs() < SMALLEST_WEIGHT).reshape(-1)
        if small.any():
            index = int(small.nonzero()[0])
            raise RuntimeError(
                f"weight[{index}] is {float(weight.reshape(-1)[index]):g}, too near to zero for invertible=True, which "
                "divides by it: 1/1024 is the least"
            )
    x = input.to(torch.float32).reshape(input.numel() // columns, columns)
    wide = x.double()
    mean = wide.mean(1).float() if centered else x.new_empty(0)
    if centered:
        wide = wide - wide.mean(1, keepdim=True)
        x = x - mean.unsqueeze(1)
    rstd = (1 / (wide.square().mean(1) + eps).sqrt()).float()
    output = x * rstd.unsqueeze(1)
    if weight is not None:
        output = output * _row(weight)
    if bias is not None:
        output = output + _row(bias)
    return output.to(input.dtype).view_as(input), mean, rstd


@torch.no_grad()
def _backward_reference(
    gradient: Tensor, saved: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    columns: int, centered: bool, invertible: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    size = (saved.numel() // columns, columns)
    dy, normalised = gradient.to(torch.float32).reshape(size), saved.to(torch.float32).reshape(size)
    if invertible:
        normalised = normalised if bias is None else normalised - _row(bias)
        normalised = normalised if weight is None else normalised / _row(weight)
    else:
        normalised = ((normalised - mean.unsqueeze(1)) if centered else normalised) * rstd.unsqueeze(1)
    scaled = dy if weight is None else dy * _row(weight)
    slope = (scaled * normalised).double().mean(1, keepdim=True).float()
    result = scaled - scaled.double().mean(1, keepdim=True).float() if centered else scaled
    result = (result - normalised * slope) * rstd.unsqueeze(1)
    none = saved.new_empty(0)
    return (
        result.to(saved.dtype).view_as(saved),
        none if weight is None else (dy * normalised).double().sum(0).float().to(weight.dtype).view_as(weight),
        none.clone() if bias is None else dy.double().sum(0).float().to(bias.dtype).view_as(bias),
    )


def _forward_fake(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, centered: bool,
    invertible: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = input.numel() // columns
    mean = input.new_empty(rows if centered else 0, dtype=torch.float32)
    return torch.empty_like(input), mean, input.new_empty(rows, dtype=torch.float32)


def _backward_fake(
    gradient: Tensor, saved: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (saved.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in (weight, bias))
    return torch.empty_like(saved), dweight, dbias


_forward = define(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, SymInt columns, float eps, bool centered, "
    "bool invertible) -> (Tensor, Tensor, Tensor)",
    _forward_reference,
    _forward_fake,
)
_backward = define(
    "norm_backward(Tensor gradient, Tensor saved, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "SymInt columns, bool centered, bool invertible) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, bias, columns, _, centered, invertible = inputs
    result, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(result if invertible else input, mean, rstd, weight, bias)
    ctx.options = (columns, centered, invertible)


def _derivative(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    saved, mean, rstd, weight, bias = ctx.saved_tensors
    *_, invertible = ctx.options
    if not ctx.needs_input_grad[2] and not invertible:
        bias = None  # it is needed for nothing but its gradient
    dx, dweight, dbias = _backward(gradient.contiguous(), saved, mean, rstd, weight, bias, *ctx.options)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None, None


differentiate(_forward, _setup, _derivative, _backward)
