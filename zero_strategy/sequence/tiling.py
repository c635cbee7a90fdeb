"""Layers that work token by token, computed over some tokens of a sequence at a time, and again in backward.

Of a layer whose inner width is larger than the model's, such as an MLP, only the inputs and outputs of all tokens are
kept; what lies between has the size of one tile. (Tiling of ALST: Bekman et al., arXiv 2506.13996.) The loss and its
logits are `linear_cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_strategy.sequence.vocabulary_loss import linear_cross_entropy


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
    if not torch.is_grad_enabled():
        return torch.cat([function(part) for part in parts], dim)
    found = [checkpoint(function, part, use_reentrant=False) for part in parts]
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


def tile_modules(model: nn.Module, tokens: int, names: Sequence[str] = ("mlp", "feed_forward")) -> list[str]:
    """Tile the modules of a model that have one of these names.

    Returns:
        Their paths.
    """
    found = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]
    for path in found:
        TiledForward(model.get_submodule(path), tokens)
    return found
