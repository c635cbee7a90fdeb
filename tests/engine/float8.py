"""Float8 layers for tests: small models in units, with torchao's layers emulated on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

WIDTH = 16
"""Sizes of float8 layers are multiples of it."""


def recipe(name: str, **changes: Any) -> Float8LinearConfig:
    """A recipe of torchao, computed on the CPU."""
    return replace(Float8LinearConfig.from_recipe_name(name), **{"emulate": True, **changes})


class Block(nn.Module):
    """A unit: two layers, a norm, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Units between a first and a last layer of other sizes."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def plain_net() -> Net:
    """The same weights at every call and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def in_blocks(module: nn.Module, name: str) -> bool:
    """Torchao's filter for the layers of units."""
    return "blocks." in name


def float8_net(config: Float8LinearConfig | None = None) -> Net:
    """The model with the layers of its units in float8."""
    net = plain_net()
    convert_to_float8_training(net, module_filter_fn=in_blocks, config=config or recipe("tensorwise"))
    return net


def kinds(module: nn.Module) -> set[str]:
    """Names of the layers that multiply in float8."""
    return {name for name, layer in module.named_modules() if type(layer).__name__ == "Float8Linear"}


IN_BLOCKS = {f"blocks.{block}.{layer}" for block in range(2) for layer in ("up", "down")}


STEPS = 3


def batches(rank: int) -> list[Tensor]:
    """A rank's batches, one per step."""
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(STEPS)]


def error_of(model: Any, x: Tensor) -> Tensor:
    """The loss of a batch."""
    found: Tensor = (model(x) - x.cos()).square().mean()
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, the parameters one after the other."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
