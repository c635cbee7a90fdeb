"""Layers that work token by token, computed over some tokens of a sequence at a time, and again in backward.

Of a layer whose inner width is larger than the model's, such as an MLP, only the inputs and outputs of all tokens are
kept; what lies between has the size of one tile. (Tiling of ALST: Bekman et al., arXiv 2506.13996.)

`linear_cross_entropy` is the loss over a vocabulary in chunks of tokens: logits are never whole. For a token with state
h and target t, z = W h + b, n = log(sum(exp(z))), smoothing e, V the size of the vocabulary:

    loss   = n - (1 - e) z_t - e / V sum(z) + z_loss n^2
    dz     = softmax(z) (1 + 2 z_loss n) - (1 - e) [j = t] - e / V
    dh = W^T dz,    dW = sum over tokens of dz h^T,    db = sum of dz

With reduction "mean" and "sum" the forward makes the gradients as it goes (three matrix products, as many as plain
torch); with "none", where a token's weight is known in the backward only, that makes the logits again (four). Logits
and sums are float32, and so are the accumulated gradients of weight and bias, whatever the dtypes of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

REDUCTIONS = ("mean", "sum", "none")
_ELEMENTS = 2**24
"""Of a chunk's logits: 64 MiB."""
_SHARE = 8
"""A chunk has at most this share of the tokens, and at least so many tokens as make a matrix product worthwhile."""
_LEAST = 64
_MLPS = ("mlp", "feed_forward")
"""Names that models give to modules which work token by token."""


@dataclass(frozen=True)
class _Options:
    ignore_index: int
    smoothing: float
    z_loss: float
    reduction: str
    chunk: int


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """cross_entropy(hidden weight^T + bias, target), without the logits in memory.

    Args:
        hidden: (..., width).
        weight: (vocabulary, width), of the dtype of `hidden`.
        target: Class of every token, int64 of shape (...); `ignore_index` for none.
        bias: (vocabulary,), or None.
        ignore_index: Such targets have no loss and no gradient.
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
        reduction: "mean" (over what is not ignored), "sum" or "none".
        z_loss: Factor of the squared logarithm of the softmax's denominator, added to every token's loss.
        chunk_size: Tokens at a time; default: by the size of the vocabulary.

    Returns:
        float32: a number, or with "none" a tensor of the target's shape.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    _check(hidden, weight, target, bias, label_smoothing, reduction, chunk_size)
    rows = hidden.reshape(-1, hidden.shape[-1])
    options = _Options(
        ignore_index, float(label_smoothing), float(z_loss), reduction, chunk_size or _chunk(len(rows), len(weight))
    )
    needed = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (rows, weight, bias))
    with torch.autocast(hidden.device.type, enabled=False):
        losses: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, target.reshape(-1), options, needed)
    return losses.view(target.shape) if reduction == "none" else losses


def _chunk(tokens: int, vocabulary: int) -> int:
    return max(1, min(_ELEMENTS // max(1, vocabulary), max(_LEAST, -(-tokens // _SHARE))))


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    chunk_size: int | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight must have shape (vocabulary, width) and hidden (..., width); they are {tuple(weight.shape)} and "
            f"{tuple(hidden.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(f"weight is {weight.dtype}, but hidden is {hidden.dtype}; cast one of them")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target has shape {tuple(target.shape)}; accepted: hidden's, {tuple(hidden.shape[:-1])}")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {target.dtype}; accepted: torch.int64, classes")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; accepted: {tuple(weight.shape[:1])}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; accepted: 0 to 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; accepted: {', '.join(map(repr, REDUCTIONS))}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; accepted: 1 and above, or None")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: _Options, needed: bool
    ) -> Tensor:
        early = needed and options.reduction != "none"
        counted = target != options.ignore_index
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3]) if early else None
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), options.chunk):
            part = slice(start, start + options.chunk)
            logits = _logits(hidden[part], weight, bias)
            losses[part], sums, norms = _losses_and_exponentials(logits, target[part], counted[part], options)
            if gradients is not None:
                _to_gradient(logits, sums, norms, target[part], counted[part].to(torch.float32), options)
                gradients.add(part, logits)
        count = counted.sum() if options.reduction == "mean" else None
        # Gradients are of the sum: what they are divided by comes with the gradient of the result, in float32.
        divisor = None if count is None else 1.0 / count.clamp(min=1)
        ctx.options, ctx.early, ctx.dtypes = options, early, (hidden.dtype, weight.dtype, weight.dtype)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, divisor)
        elif needed:
            ctx.save_for_backward(hidden, weight, bias, target)
        if options.reduction == "none":
            return losses
        return losses.sum() if count is None else losses.sum() / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("linear_cross_entropy has no second derivative")
        if ctx.early:
            *totals, divisor = ctx.saved_tensors
            factor = gradient if divisor is None else gradient * divisor
        else:
            totals, factor = _made_again(ctx, gradient), None
        found = [
            None if total is None else _scaled(total, factor, dtype)
            for total, dtype in zip(totals, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None


class _Gradients:
    """Sums over chunks, of what is asked for."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        # float16 would lose what a loss scale is there to keep.
        dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        self._inputs = hidden, weight
        self.hidden = torch.empty_like(hidden, dtype=dtype) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        self.bias = weight.new_zeros(len(weight), dtype=torch.float32) if bias is not None and needed[2] else None

    def add(self, part: slice, logits: Tensor) -> None:
        """Add the gradients of a chunk whose logits have this gradient, float32."""
        hidden, weight = self._inputs
        if self.bias is not None:
            self.bias += logits.sum(0)
        low = logits.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[part] = low @ weight
        if self.weight is not None:
            if low.dtype == torch.float32:
                self.weight.addmm_(low.t(), hidden[part])
            else:
                self.weight += low.t() @ hidden[part]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.mm(hidden, weight.t()).to(torch.float32)
    return logits if bias is None else logits.add_(bias)


def _losses_and_exponentials(
    logits: Tensor, target: Tensor, counted: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, the softmax's denominators and their logarithms; `logits` becomes the numerators."""
    chosen = logits.gather(1, torch.where(counted, target, 0)[:, None]).squeeze(1)
    spread = logits.mean(1) * options.smoothing if options.smoothing else 0.0
    most = logits.amax(1)
    sums = logits.sub_(most[:, None]).exp_().sum(1)
    norms = most + sums.log()
    losses = norms - (1 - options.smoothing) * chosen - spread
    if options.z_loss:
        losses = losses + options.z_loss * norms.square()
    return torch.where(counted, losses, 0.0), sums, norms


def _to_gradient(
    logits: Tensor, sums: Tensor, norms: Tensor, target: Tensor, factor: Tensor, options: _Options
) -> None:
    """The softmax's numerators become the gradient of the loss of each token, times its factor."""
    slope = factor / sums
    if options.z_loss:
        slope = slope * (1 + 2 * options.z_loss * norms)
    logits.mul_(slope[:, None])
    if options.smoothing:
        logits.sub_((factor * (options.smoothing / logits.shape[1]))[:, None])
    place = torch.where(target != options.ignore_index, target, 0)[:, None]
    logits.scatter_add_(1, place, (factor * (options.smoothing - 1))[:, None])


def _made_again(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """Gradients of losses that were not reduced."""
    hidden, weight, bias, target = ctx.saved_tensors
    options: _Options = ctx.options
    counted = target != options.ignore_index
    gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
    for start in range(0, len(hidden), options.chunk):
        part = slice(start, start + options.chunk)
        logits = _logits(hidden[part], weight, bias)
        _, sums, norms = _losses_and_exponentials(logits, target[part], counted[part], options)
        factor = torch.where(counted[part], gradient[part], 0.0)
        _to_gradient(logits, sums, norms, target[part], factor, options)
        gradients.add(part, logits)
    return [gradients.hidden, gradients.weight, gradients.bias]


def _scaled(total: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scale in one pass, also into another dtype."""
    return total.to(dtype) if factor is None else torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tokens: int, dim: int = 1) -> Tensor:
    """`function(x)`, of so many tokens at a time; what it keeps for backward is computed again there.

    Args:
        function: Works on each token by itself, such as an MLP.
        x: Tokens along `dim`.
        tokens: At a time.
        dim: See `x`.

    Raises:
        ValueError: If `tokens` is less than 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: at least 1 at a time")
    if x.shape[dim] <= tokens:
        return function(x)
    parts = x.split(tokens, dim)

    def of_part(part: Tensor) -> Tensor:
        return function(part.contiguous())  # for views of it; in the checkpoint, that it keeps none

    if not torch.is_grad_enabled():
        return torch.cat([of_part(part) for part in parts], dim)
    found = [checkpoint(of_part, part, use_reentrant=False) for part in parts]
    return torch.cat(found, dim)


def loss_tile(tokens: int, vocabulary: int) -> int:
    """Tokens of the loss at a time, where MLPs take `tokens`: as many as make logits of 64 MiB, or 64."""
    return min(tokens, max(64, 2**24 // vocabulary))


class TiledForward:
    """Stands in for the `forward` of a module that works token by token. A copy of the module has the class's own.

    Args:
        module: Takes and gives (batch, tokens, width).
        tokens: At a time, of all samples together.
    """

    def __init__(self, module: nn.Module, tokens: int) -> None:
        self._module, self._forward, self._tokens = module, module.forward, tokens
        object.__setattr__(module, "forward", self)

    def undo(self) -> None:
        """Let the module have its own `forward` again."""
        if vars(self._module).get("forward") is self:
            object.__delattr__(self._module, "forward")

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dim() < 3:
            return self._forward(x, *args, **kwargs)
        return tiled(self._forward, x, max(1, self._tokens // x.shape[0]))

    def __deepcopy__(self, memo: Any) -> PlainForward:
        return PlainForward(memo.get(id(self._module)), None)

    def __reduce__(self) -> Any:
        return PlainForward, (self._module, None)


class PlainForward:
    """The class's own `forward`, or an own one of the module, in a copy of a module whose `forward` is replaced."""

    def __init__(self, module: nn.Module | None, forward: Callable[..., Any] | None) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        assert self.module is not None
        return type(self.module).forward(self.module, *args, **kwargs)


class TiledHead:
    """Stands in for the `forward` of a model's last layer, and computes the loss there, without logits.

    The layer's weight is whole inside of its own forward, whoever shards it.

    Args:
        head: Makes logits of states.
        tokens: At a time.
    """

    def __init__(self, head: nn.Linear, tokens: int) -> None:
        self._head, self._forward, self._tokens = head, head.forward, tokens
        self._labels: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        object.__setattr__(head, "forward", self)

    def undo(self) -> None:
        """Let the layer have its own `forward` again."""
        if vars(self._head).get("forward") is self:
            object.__delattr__(self._head, "forward")

    def expect(self, labels: Tensor) -> None:
        """The next forward computes the loss of these labels, (batch, tokens); -100 counts for nothing."""
        self._labels, self._found = labels, None

    def forget(self) -> None:
        """The next forward gives logits."""
        self._labels = self._found = None

    def __call__(self, states: Tensor) -> Tensor:
        labels, self._labels = self._labels, None
        if labels is None or labels.shape != states.shape[:-1]:
            found: Tensor = self._forward(states)
            return found
        weight, bias, x = self._head.weight, self._head.bias, states
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        chunk = loss_tile(self._tokens, len(weight))
        loss = linear_cross_entropy(x, weight, labels, bias, reduction="sum", chunk_size=chunk)
        self._found = loss, states
        return states

    def take(self, logits: Tensor) -> Tensor:
        """The sum of losses that the last forward computed.

        Args:
            logits: What the model takes for logits, to see that it is what the head gave.

        Raises:
            ValueError: If it is not: the model computes with its logits.
        """
        found, self._found = self._found, None
        if found is None or found[1] is not logits:
            raise ValueError(
                "activation_checkpointing.tile_tokens: the model computes with its logits before the loss (a scale, a "
                "soft cap, a choice of tokens), and tiles have none; leave tile_tokens out for it"
            )
        return found[0]

    def __deepcopy__(self, memo: Any) -> PlainForward:
        return PlainForward(memo.get(id(self._head)), None)

    def __reduce__(self) -> Any:
        return PlainForward, (self._head, None)


def tileable_modules(model: nn.Module, names: Sequence[str] = _MLPS) -> list[str]:
    """Paths of the modules of a model that have one of these names."""
    return [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]


def tile_modules(model: nn.Module, tokens: int, names: Sequence[str] = _MLPS) -> list[str]:
    """Tile the modules of a model that have one of these names.

    Returns:
        Their paths.
    """
    found = tileable_modules(model, names)
    for path in found:
        TiledForward(model.get_submodule(path), tokens)
    return found
