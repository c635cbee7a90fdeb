"""Layers that the tests of this directory share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec

WIDTH, WORDS = 6, 11


class Block(nn.Module):
    """A linear layer with a residual."""

    def __init__(self, width: int, log: list[str] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        if log is not None:
            log.append(str(self.linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Wide(Block):
    """A block with a wider part beside it."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__(width)
        self.inner = nn.Sequential(nn.Linear(width, factor * width), nn.ReLU(), nn.Linear(factor * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner(x)


def logits(embedding: Any, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def double(x: Tensor) -> Tensor:
    return 2 * x


def specs(blocks: int = 4, log: list[str] | None = None) -> list[Any]:
    return [LayerSpec(Block, WIDTH, log=log) for _ in range(blocks)]


def tied_specs(blocks: int = 3) -> list[Any]:
    """An embedding, blocks with a function between them, and a head that is the embedding."""
    middle: list[Any] = [LayerSpec(Wide, WIDTH, 1 + i) for i in range(blocks)]
    middle.insert(1, double)
    return [
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH),
        *middle,
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=logits),
    ]


def words(batch: int = 3, length: int = 4) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) * 7 % WORDS
