"""A small model with layers of experts that says by three methods how ranks divide them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS = 8, 12, 8


class Experts(nn.Module):
    """Two-layer experts, one after the other along the first dimension."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(experts, WIDTH))
        self.count = experts

    def expert_parameters(self) -> Sequence[str]:
        return ["up", "down", "bias"]

    def number_of_experts(self) -> int:
        return len(self.up)

    def hold_experts(self, count: int) -> None:
        self.count = count

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.count):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                results = (tokens[rows] @ self.up[number]).tanh() @ self.down[number] + self.bias[number]
                out = out.index_add(0, rows, results * weights[rows, place, None])
        return out


class Block(nn.Module):
    """A router, experts and a layer that all ranks have."""

    def __init__(self, choices: int = 2, only: int | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.choices, self.only = choices, only

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x).tanh()
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat)[:, : self.only].softmax(dim=-1)
        weights, chosen = scores.topk(self.choices, dim=-1)
        return x + self.experts(flat, chosen, weights).view(x.shape)


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 2, choices: int = 2, only: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(choices, only) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def make(seed: int = 0, **options: int) -> Model:
    """The model with the values of a seed, in float64."""
    torch.manual_seed(seed)
    return Model(**options).double()


def batch(rank: int, step: int, samples: int = 3, tokens: int = 5) -> Tensor:
    """Samples of a rank in a step, (samples, tokens, WIDTH) float64."""
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, tokens, WIDTH, generator=chance, dtype=torch.float64)
