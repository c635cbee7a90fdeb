"""Every native op beside what torch has for it: pairs of steps, torch's first, for benchmarks.ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy import ops, optim

Step = Callable[[], Any]
Call = Callable[..., Any]
Pair = tuple[Call, Call]
BLOCK = 256
_FACTOR = 1.0009765625


@dataclass(frozen=True)
class Setting:
    """Shape of a case: rows x columns, or `tensors` tensors of together `numel` elements."""

    device: str
    dtype: torch.dtype
    rows: int
    columns: int
    numel: int
    tensors: int

    def make(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        return values.to(self.device, dtype or self.dtype)

    def list_of(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [self.make(self.numel // self.tensors, dtype=dtype) for _ in range(self.tensors)]

    @property
    def activations(self) -> Tensor:
        return self.make(self.rows, self.columns)

    @property
    def column(self) -> Tensor:
        return self.make(self.columns)


# --------------------------------------------------------------------------------------- layers, with their gradients


def layer_norm(s: Setting) -> tuple[Pair, list[Tensor]]:
    return (
        lambda x, w, b: F.layer_norm(x, (s.columns,), w, b),
        lambda x, w, b: ops.layer_norm(x, s.columns, w, b),
    ), [s.activations, s.column, s.column]


def layer_norm_frozen(s: Setting) -> tuple[Pair, list[Tensor]]:
    """Only the input needs a gradient."""
    w, b = s.column, s.column
    (theirs, ours), (x, *_) = layer_norm(s)
    return (lambda x: theirs(x, w, b), lambda x: ours(x, w, b)), [x]


def rms_norm(s: Setting) -> tuple[Pair, list[Tensor]]:
    return (
        lambda x, w: F.rms_norm(x, (s.columns,), w),
        lambda x, w: ops.rms_norm(x, s.columns, w),
    ), [s.activations, s.column]


def bias_gelu(s: Setting, approximate: str) -> tuple[Pair, list[Tensor]]:
    return (
        lambda x, b: F.gelu(x + b, approximate=approximate),
        lambda x, b: ops.bias_gelu(x, b, approximate=approximate),
    ), [s.activations, s.column]


def gelu(s: Setting) -> tuple[Pair, list[Tensor]]:
    """Without a bias: one kernel against one."""
    return (F.gelu, lambda x: ops.bias_gelu(x, None)), [s.activations]


def bias_dropout_residual(s: Setting) -> tuple[Pair, list[Tensor]]:
    state = ops.random_state(1)
    return (
        lambda x, b, r: r + F.dropout(x + b, 0.1),
        lambda x, b, r: ops.bias_dropout_residual(x, b, r, 0.1, state),
    ), [s.activations, s.column, s.activations]


def softmax(s: Setting) -> tuple[Pair, list[Tensor]]:
    return (lambda x: x.softmax(-1), ops.masked_softmax_dropout), [s.activations]


def masked_softmax(s: Setting, p: float) -> tuple[Pair, list[Tensor]]:
    """Causal, as the eager composition has it: a mask that is added."""
    size, state = min(s.columns, s.rows), ops.random_state(1)
    mask = torch.full((size, size), -math.inf, device=s.device, dtype=s.dtype).triu(1)
    x = s.make(s.rows // size, size, size)
    return (
        lambda x: F.dropout((x + mask).softmax(-1), p) if p else (x + mask).softmax(-1),
        lambda x: ops.masked_softmax_dropout(x, mask, p=p, state=state),
    ), [x]


LAYERS: dict[str, Callable[[Setting], tuple[Pair, list[Tensor]]]] = {
    "layer_norm": layer_norm,
    "layer_norm_frozen": layer_norm_frozen,
    "rms_norm": rms_norm,
    "gelu": gelu,
    "bias_gelu": partial(bias_gelu, approximate="none"),
    "bias_gelu_tanh": partial(bias_gelu, approximate="tanh"),
    "bias_dropout_residual": bias_dropout_residual,
    "softmax": softmax,
    "masked_softmax": partial(masked_softmax, p=0.0),
    "masked_softmax_dropout": partial(masked_softmax, p=0.1),
}


def forward(make: Callable[[Setting], tuple[Pair, list[Tensor]]], s: Setting) -> tuple[Step, Step]:
    (theirs, ours), leaves = make(s)
    return partial(theirs, *leaves), partial(ours, *leaves)


def backward(make: Callable[[Setting], tuple[Pair, list[Tensor]]], s: Setting) -> tuple[Step, Step]:
    pair, leaves = make(s)

    def step_of(call: Call) -> Step:
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        output = call(*own)
        return partial(torch.autograd.grad, output, own, torch.randn_like(output), retain_graph=True)

    return step_of(pair[0]), step_of(pair[1])


# ---------------------------------------------------------------------------------------------------- lists of tensors


def grad_stats(s: Setting) -> tuple[Step, Step]:
    grads = s.list_of()
    return lambda: torch.stack(torch._foreach_norm(grads)).isfinite().all(), lambda: ops.grad_stats(grads)


def l2norm(s: Setting) -> tuple[Step, Step]:
    grads = s.list_of()
    return lambda: torch._foreach_norm(grads), lambda: ops.l2norm(grads, per_tensor=True)


def scale(s: Setting) -> tuple[Step, Step]:
    theirs, mine = s.list_of(), s.list_of()
    return lambda: torch._foreach_mul_(theirs, _FACTOR), lambda: ops.scale_(mine, mine, _FACTOR)


def axpby(s: Setting) -> tuple[Step, Step]:
    theirs, mine, y = s.list_of(), s.list_of(), s.list_of()

    def composed() -> None:
        torch._foreach_mul_(theirs, 0.5)
        torch._foreach_add_(theirs, y, alpha=0.5)

    return composed, lambda: ops.axpby_(mine, y, mine, 0.5, 0.5)


def _flat(s: Setting, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[int]]:
    """A buffer, its parts, and where they begin."""
    length = s.numel // s.tensors
    flat = s.make(length * s.tensors, dtype=dtype)
    return flat, list(flat.split(length)), list(range(0, flat.numel(), length))


def accumulate(s: Setting) -> tuple[Step, Step]:
    """Into a float32 bucket."""
    grads, (_, parts, _), mine = s.list_of(), _flat(s, torch.float32), s.list_of(torch.float32)

    def composed() -> None:
        for part, grad in zip(parts, grads, strict=True):
            part += grad.float()

    return composed, lambda: ops.accumulate_(mine, grads)


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


def flatten(s: Setting) -> tuple[Step, Step]:
    """With a cast to the other dtype."""
    tensors, theirs, (mine, _, offsets) = s.list_of(), _flat(s, _other(s.dtype))[0], _flat(s, _other(s.dtype))
    return lambda: torch.cat(tensors, out=theirs), lambda: ops.flatten_(tensors, mine, offsets)


def unflatten(s: Setting) -> tuple[Step, Step]:
    """With a cast from the other dtype."""
    (flat, parts, offsets), theirs, mine = _flat(s, _other(s.dtype)), s.list_of(), s.list_of()
    return lambda: torch._foreach_copy_(theirs, parts), lambda: ops.unflatten_(flat, mine, offsets)


# ---------------------------------------------------------------------------------------------------------- optimizers


def parameters(s: Setting, dtype: torch.dtype) -> list[nn.Parameter]:
    made = [nn.Parameter(tensor) for tensor in s.list_of(dtype)]
    for parameter, gradient in zip(made, s.list_of(dtype), strict=True):
        parameter.grad = gradient
    return made


def plain(params: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and gradients."""
    return [each.detach() for each in params], [each.grad for each in params if each.grad is not None]


def optimizer(s: Setting, ours: Call, theirs: Callable[[list[nn.Parameter]], Step]) -> tuple[Step, Step]:
    """bfloat16: low-precision parameters and gradients with float32 master weights, on both sides."""
    mine: Step = ours(parameters(s, s.dtype)).step
    master = parameters(s, torch.float32)
    step = theirs(master)
    if s.dtype == torch.float32:
        return step, mine
    weights, wide = plain(master)
    low, low_grads = s.list_of(), s.list_of()

    def whole() -> None:
        torch._foreach_copy_(wide, low_grads)
        step()
        torch._foreach_copy_(low, weights)

    return whole, mine


def fused(name: str, params: list[nn.Parameter], **options: Any) -> Step:
    step: Step = getattr(torch.optim, name)(params, fused=True, **options).step
    return step


def adamw_against_copy(s: Setting) -> tuple[Step, Step]:
    """A plain copy that moves as many bytes as AdamW: 28 per parameter, half of them written.

    bfloat16: 24 for the float32 weight and moments, 2 for the gradient and 2 for the weight that goes out.
    """
    source = torch.zeros(14 * s.numel, dtype=torch.uint8, device=s.device)
    target = torch.empty_like(source)
    mine: Step = optim.FusedAdamW(parameters(s, s.dtype)).step
    return lambda: target.copy_(source), mine


def foreach_lion(params: list[nn.Parameter]) -> Step:
    weights, grads = plain(params)
    moments = [torch.zeros_like(each) for each in weights]

    def step() -> None:
        torch._foreach_mul_(weights, 0.9999)
        update = torch._foreach_lerp(moments, grads, 0.1)
        torch._foreach_sign_(update)
        torch._foreach_add_(weights, update, alpha=-1e-4)
        torch._foreach_lerp_(moments, grads, 0.01)

    return step


def foreach_lamb(params: list[nn.Parameter]) -> Step:
    weights, grads = plain(params)
    first, second = ([torch.zeros_like(each) for each in weights] for _ in range(2))

    def step() -> None:
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, grads, grads, 0.001)
        root = torch._foreach_sqrt(second)
        torch._foreach_add_(root, 1e-6)
        update = torch._foreach_div(first, root)
        torch._foreach_add_(update, weights, alpha=0.01)
        norms = torch._foreach_norm(weights), torch._foreach_norm(update)
        torch._foreach_mul_(update, torch._foreach_div(*norms))
        torch._foreach_add_(weights, update, alpha=-1e-3)

    return step


# -------------------------------------------------------------------------------------------------------- quantisation


def composed_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales).round_().clamp_(-127, 127).to(torch.int8), scales.half()


def quantize(s: Setting) -> tuple[Step, Step]:
    x = s.make(s.numel // BLOCK * BLOCK)
    return lambda: composed_quantize(x), lambda: ops.quantize_blocks(x, block_size=BLOCK)


def dequantize(s: Setting) -> tuple[Step, Step]:
    x = s.make(s.numel // BLOCK * BLOCK)
    codes, scales = composed_quantize(x)
    mine = ops.quantize_blocks(x, block_size=BLOCK)
    return (
        lambda: (codes * scales.float()).to(s.dtype),
        lambda: ops.dequantize_blocks(*mine, x.shape, block_size=BLOCK, dtype=s.dtype),
    )


CASES: dict[str, Callable[[Setting], tuple[Step, Step]]] = {
    **{name: partial(forward, make) for name, make in LAYERS.items() if not name.endswith("_frozen")},
    **{f"{name}_backward": partial(backward, make) for name, make in LAYERS.items()},
    "grad_stats": grad_stats,
    "l2norm": l2norm,
    "scale": scale,
    "axpby": axpby,
    "accumulate": accumulate,
    "flatten": flatten,
    "unflatten": unflatten,
    "adamw": lambda s: optimizer(s, optim.FusedAdamW, partial(fused, "AdamW")),
    "adamw_against_copy": adamw_against_copy,
    "adagrad": lambda s: optimizer(s, optim.FusedAdagrad, partial(fused, "Adagrad")),
    "sgd": lambda s: optimizer(
        s, partial(optim.FusedSGD, lr=1e-3, momentum=0.9), partial(fused, "SGD", lr=1e-3, momentum=0.9)
    ),
    "lion": lambda s: optimizer(s, optim.FusedLion, foreach_lion),
    "lamb": lambda s: optimizer(s, optim.FusedLamb, foreach_lamb),
    "quantize": quantize,
    "dequantize": dequantize,
}
"""Torch's step and ours, by name."""
