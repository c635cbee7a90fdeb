"""Models for the command line."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Stack(nn.Module):
    """Equal layers."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


class LooksAtValues(nn.Module):
    """Reads a number out of a tensor while it is built, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.layers = nn.ModuleList(nn.Linear(100 + int(rate), 100) for rate in rates)


ready = Stack()
number = 3


def returns_nothing() -> None:
    """A factory that forgot its return."""


def gpt(hidden: int, layers: int, vocabulary: int) -> nn.Module:
    """The module that the shapes of plain numbers stand for."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(hidden)
            self.attention = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden), "out": nn.Linear(hidden, hidden)})
            self.norm2 = nn.LayerNorm(hidden)
            self.mlp = nn.ModuleDict({"up": nn.Linear(hidden, 4 * hidden), "down": nn.Linear(4 * hidden, hidden)})

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, hidden)
            self.norm = nn.LayerNorm(hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(hidden, vocabulary, bias=False)
            self.head.weight = self.embedding.weight

    return GPT()


class Experts(nn.Module):
    """A layer of experts, each one matrix with a bias, stacked along the first dimension."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.bias = nn.Parameter(torch.zeros(count, width))

    def expert_parameters(self) -> list[str]:
        """See `DivisibleExperts`."""
        return ["weight", "bias"]

    def number_of_experts(self) -> int:
        """See `DivisibleExperts`."""
        return self.count

    def hold_experts(self, count: int) -> None:
        """See `DivisibleExperts`."""
        self.count = count

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `zero_strategy.experts.layers`."""
        found = torch.zeros_like(tokens)
        for expert in range(self.count):
            rows, places = torch.where(chosen == expert)
            values = tokens[rows] @ self.weight[expert] + self.bias[expert]
            found = found.index_add(0, rows, values * weights[rows, places].unsqueeze(1))
        return found


class MixtureBlock(nn.Module):
    """A linear layer, then for each row its best two experts."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of `width` numbers, to as many."""
        x = self.dense(x)
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        found: Tensor = x + self.experts(x, chosen, weights)
        return found


class Mixture(nn.Module):
    """Blocks with experts; `rows` of a batch."""

    def __init__(self, experts: int = 4, width: int = 10, depth: int = 3, rows: int = 6) -> None:
        super().__init__()
        self.width, self.rows = width, rows
        self.blocks = nn.ModuleList(MixtureBlock(experts, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to (rows, 3)."""
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found
