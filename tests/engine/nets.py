"""Tiny modules for the scripts: a few units of a few dozen parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 6


class Block(nn.Module):
    """A unit: two layers, a norm, a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """A root with parameters of its own around three units."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * self.scale
        return out


def net(depth: int = 3, width: int = WIDTH, seed: int = 0) -> Net:
    """The same weights at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(depth, width)


def seeded(build: type[nn.Module], *args: object, seed: int = 0, **kwargs: object) -> nn.Module:
    """Any module with the weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(*args, **kwargs)


def loss_of(output: Tensor) -> Tensor:
    """A loss with a gradient that depends on every output."""
    factors = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view_as(output)
    return (output * factors).sum() + output.square().mean()
