"""Tiny models with all that may go wrong: ties, frozen and unused parameters, buffers, dropout, several groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec

WIDTH, WORDS, ROWS, LENGTH = 8, 11, 2, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Tiny(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.8))
        self.unused = nn.Parameter(torch.randn(5))
        self.sometimes = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.float().mean()
        x = self.embedding(tokens) + self.position
        if bool(tokens[0, 0] % 2):
            x = x + self.sometimes
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def tiny() -> Any:
    batches = [torch.randint(0, WORDS, (ROWS, LENGTH + 1)) for _ in range(24)]
    return Tiny(), optimizer_of, batches, loss_of


def changing() -> Any:
    """Another model at every call."""
    torch.seed()
    return tiny()


# ---------------------------------------------------------------------------------------------------- as layers


class Step(Block):
    """A block that counts, and has a frozen and an unused parameter."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH) * 0.1, requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().float().mean()
        return super().forward(x + self.shift)


def read_out(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def loss_of_words(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten())


def layered() -> Any:
    """For pipelines: the embedding's weight is that of the last layer, too."""
    tokens = [torch.randint(0, WORDS, (ROWS, LENGTH + 1)) for _ in range(24)]
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(Step) for _ in range(4)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=read_out),
    ]
    return layers, optimizer_of, batches, loss_of_words
