"""Fused layer ops: norms, dropout with a residual, gelu with a bias, masked softmax, and their Philox masks.

Masks have the same bits as those of cpp/philox.h.

A tensor's element i takes word i % 4 of the block with counter (i / 4, offset), low words first, and key `seed`. So a
mask is a function of seed, offset and index: forward, recomputation and backward agree, for any number of threads and
on every device, and nothing is stored. Two dropouts of one step must differ in `offset` (or `seed`), by any amount.

    approximate="none"    y = x Phi(x), Phi the normal distribution
    approximate="tanh"    y = x (1 + tanh(u)) / 2,  u = sqrt(2 / pi) (x + 0.044715 x^3)

Arithmetic is float32 whatever the dtypes. The native kernels use exp and Phi of their own (cpp/functions.h), made of
IEEE operations only, so that every processor and any place in a buffer gives the same bits; the lower tail, lost to
cancellation in torch's formula, is kept. Against float64, y is within 4 ulp for x >= -1 in both forms; below that it is
within 7 ulp with "none" and a relative 2e-5 with "tanh", and 0 where it is below 1e-36. dy/dx is within 3e-7. The
bias's gradient is a float64 sum in an order that depends on the shape alone.

A mask is not stored: the backward makes it anew.

    y = residual + (keep ? (x + bias) * (1 / (1 - p)) : 0)
    dresidual = dy,    dx = keep ? dy * (1 / (1 - p)) : 0,    dbias = sum over rows of dx

An element is dropped if its random word is below p * 2^32. What is dropped is 0 whatever it was, infinite and NaN
included. Arithmetic is float32, one rounding per operation; kernels and reference give the same bits, but for the order
of the bias gradient's float64 sum, which depends on the shape alone.

    t = input + mask                          (causal: only columns j <= i of query i; what lies beyond is not read)
    q = exp(t - max(t)) / sum(exp(t - max(t)))
    y = keep ? q * (1 / (1 - p)) : 0

    g = keep ? dy * (1 / (1 - p)) : 0,    dinput = q * (g - sum(g * q)),    dmask = dinput summed to the mask's shape

A row of which every element is masked (-infinity) gives zeros, and no gradient, where torch gives NaN. A NaN or
+infinity among the visible elements makes its row NaN. Without dropout only y is saved, with dropout only q (in the
input's dtype); the dropout mask is never stored. Arithmetic is float32 with float64 sums; the native kernels' exp is
within 1 ulp (cpp/functions.h), and q within a relative 4e-7 + 6e-8 |t - max(t)|, the second part from rounding the
difference. What is below exp(-87) is 0.

Layer norm and RMS norm have a form whose backward needs the output instead of the input.

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

from zero_strategy.ops.library import check_probability, check_tensor, define, differentiate

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def random_state(seed: int, offset: int = 0) -> Tensor:
    """Seed and offset as the ops take them: int64 of shape (2,), so that a compiled graph does not depend on them.

    Args:
        seed: From -2^63 to 2^64 - 1; taken modulo 2^64.
        offset: Likewise.
    """
    signed = []
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{name} must fit into 64 bits; it is {value}")
        signed.append(value - 2**64 if value >= 2**63 else value)
    return torch.tensor(signed, dtype=torch.int64)


def check_state(state: Tensor) -> None:
    """`state` is what `random_state` returns.

    Raises:
        TypeError, ValueError: If not.
    """
    check_tensor("state", state, dtypes=(torch.int64,), shape=(2,))
    if state.device.type != "cpu":
        raise ValueError(f"state must be on the CPU, not on {state.device}")


def philox_words(state: Tensor, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """The random words of elements 0 to numel - 1, as int64 from 0 to 2^32 - 1."""
    seed, offset = (int(number) for number in state)
    block = torch.arange((numel + 3) // 4, device=device, dtype=torch.int64)
    constants = (torch.full_like(block, part) for part in ((offset & WORD), (offset >> 32) & WORD))
    return torch.stack(philox(block & WORD, block >> 32, *constants, seed=seed), 1).reshape(-1)[:numel]


def philox(a: Tensor, b: Tensor, c: Tensor, d: Tensor, *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of every counter (a, b, c, d); int64 tensors of 32-bit words."""
    keys = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        (high, low), (second_high, second_low) = _product(a, _MULTIPLIERS[0]), _product(c, _MULTIPLIERS[1])
        a, b, c, d = second_high ^ b ^ keys[0], second_low, high ^ d ^ keys[1], low
        keys = [(key + step) & WORD for key, step in zip(keys, _STEPS, strict=True)]
    return a, b, c, d


def kept(state: Tensor, p: float, like: Tensor) -> Tensor:
    """Mask of the elements that dropout with probability p keeps, in the shape and on the device of `like`."""
    threshold = min(int(p * 2.0**32 + 0.5), WORD)
    return (philox_words(state, like.numel(), like.device) >= threshold).view(like.shape)


def keep_scale(p: float) -> float:
    """Factor of the kept elements, a float32."""
    return 0.0 if p >= 1 else float(torch.tensor(1 / (1 - p), dtype=torch.float32))


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of a 64-bit product, without leaving 63 bits."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & WORD


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
    output: Tensor = _gelu_forward(
        input.contiguous(), None if bias is None else bias.contiguous(), approximate == "tanh"
    )
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
def _gelu_forward_reference(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return torch.nn.functional.gelu(_biased(input, bias), approximate=_form(tanh)).to(input.dtype)


@torch.no_grad()
def _gelu_backward_reference(gradient: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    biased = _biased(input, bias)
    result = torch.ops.aten.gelu_backward(gradient.to(torch.float32), biased, approximate=_form(tanh))
    parameter = sum_of_rows(result, bias)
    return result.to(input.dtype), parameter if bias is not None else parameter.to(input.dtype)


def _gelu_forward_fake(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return torch.empty_like(input)


def _gelu_backward_fake(gradient: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty(0) if bias is None else torch.empty_like(bias)


_gelu_forward = define(
    "bias_gelu(Tensor input, Tensor? bias, bool tanh) -> Tensor", _gelu_forward_reference, _gelu_forward_fake
)
_gelu_backward = define(
    "bias_gelu_backward(Tensor gradient, Tensor input, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    _gelu_backward_reference,
    _gelu_backward_fake,
)


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, ctx.tanh = inputs
    ctx.save_for_backward(input, bias)


def _gelu_derivative(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, bias = ctx.saved_tensors
    dx, dbias = _gelu_backward(gradient.contiguous(), input, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


differentiate(_gelu_forward, _gelu_setup, _gelu_derivative, _gelu_backward)


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
    output: Tensor = _dropout_forward(input.contiguous(), bias, residual.contiguous(), state.contiguous(), float(p))
    return output


# ------------------------------------------------------------------------------------------------ references


def drop(values: Tensor, state: Tensor, p: float) -> Tensor:
    """Dropout of float32 values."""
    return torch.where(kept(state, p, values), values * keep_scale(p), 0.0) if p > 0 else values


@torch.no_grad()
def _dropout_forward_reference(input: Tensor, bias: Tensor | None, residual: Tensor, state: Tensor, p: float) -> Tensor:
    wide = input.to(torch.float32)
    dropped = drop(wide if bias is None else wide + bias.to(torch.float32), state, p)
    return (residual.to(torch.float32) + dropped).to(residual.dtype)


@torch.no_grad()
def _dropout_backward_reference(
    gradient: Tensor, bias: Tensor | None, state: Tensor, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    result = drop(gradient.to(torch.float32), state, p)
    parameter = sum_of_rows(result, bias)
    # a result may not be an argument
    return result.to(dtype, copy=True), parameter if bias is not None else parameter.to(gradient.dtype)


def _dropout_forward_fake(input: Tensor, bias: Tensor | None, residual: Tensor, state: Tensor, p: float) -> Tensor:
    return torch.empty_like(residual)


def _dropout_backward_fake(
    gradient: Tensor, bias: Tensor | None, state: Tensor, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    parameter = gradient.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(gradient, dtype=dtype), parameter


_dropout_forward = define(
    "bias_dropout_residual(Tensor input, Tensor? bias, Tensor residual, Tensor state, float p) -> Tensor",
    _dropout_forward_reference,
    _dropout_forward_fake,
)
_dropout_backward = define(
    "bias_dropout_residual_backward(Tensor gradient, Tensor? bias, Tensor state, float p, ScalarType dtype) "
    "-> (Tensor, Tensor)",
    _dropout_backward_reference,
    _dropout_backward_fake,
)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, _, state, ctx.p = inputs
    ctx.dtype = input.dtype
    ctx.save_for_backward(bias, state)


def _dropout_derivative(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    bias, state = ctx.saved_tensors
    needs_input, needs_bias, *_ = ctx.needs_input_grad
    if not needs_input and not needs_bias:
        return None, None, gradient, None, None
    bias = bias if needs_bias else None
    dx, dbias = _dropout_backward(gradient.contiguous(), bias, state, ctx.p, ctx.dtype)
    return dx, None if bias is None else dbias, gradient, None, None


differentiate(_dropout_forward, _dropout_setup, _dropout_derivative, _dropout_backward)


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
    output: Tensor = _softmax_forward(input.contiguous(), mask, state.contiguous(), causal, float(p))[0]
    return output


def _check_broadcast(mask: Tensor, input: Tensor) -> None:
    sizes = zip(reversed(mask.shape), reversed(input.shape), strict=False)
    if mask.dim() > input.dim() or any(own not in (1, other) for own, other in sizes):
        raise ValueError(f"mask's shape {tuple(mask.shape)} must broadcast to input's, {tuple(input.shape)}")


# ------------------------------------------------------------------------------------------------ references


@torch.no_grad()
def _softmax_forward_reference(
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
def _softmax_backward_reference(gradient: Tensor, probabilities: Tensor, state: Tensor, p: float) -> Tensor:
    share, through = probabilities.to(torch.float32), drop(gradient.to(torch.float32), state, p)
    shift = (share * through).double().sum(-1, keepdim=True).float()
    return (share * (through - shift)).to(gradient.dtype)


def _softmax_forward_fake(
    input: Tensor, mask: Tensor | None, state: Tensor, causal: bool, p: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(input) if p > 0 else input.new_empty(0)


def _softmax_backward_fake(gradient: Tensor, probabilities: Tensor, state: Tensor, p: float) -> Tensor:
    return torch.empty_like(gradient)


_softmax_forward = define(
    "masked_softmax_dropout(Tensor input, Tensor? mask, Tensor state, bool causal, float p) -> (Tensor, Tensor)",
    _softmax_forward_reference,
    _softmax_forward_fake,
)
_softmax_backward = define(
    "masked_softmax_dropout_backward(Tensor gradient, Tensor probabilities, Tensor state, float p) -> Tensor",
    _softmax_backward_reference,
    _softmax_backward_fake,
)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, state, _, ctx.p = inputs
    result, probabilities = output
    ctx.mark_non_differentiable(probabilities)
    ctx.save_for_backward(probabilities if ctx.p > 0 else result, state)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)


def _softmax_derivative(ctx: Any, gradient: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
    probabilities, state = ctx.saved_tensors
    dinput = _softmax_backward(gradient.contiguous(), probabilities, state, ctx.p)
    dmask = None
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.mask
        dmask = dinput.to(torch.float32).sum_to_size(shape).to(dtype)
    return dinput, dmask, None, None, None


differentiate(_softmax_forward, _softmax_setup, _softmax_derivative, _softmax_backward)


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
    """See `torch.nn.functional.layer_norm`.

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
    """See `torch.nn.functional.rms_norm`: `eps` defaults to the input dtype's. Otherwise as `layer_norm`."""
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
