"""Blocks with dropout from two states, adapters, every kind of argument; and the options that they are run under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.activation.rng import DEFAULT_NAME, CudaRNGStatesTracker
from zero_strategy.activation.settings import CheckpointSettings

WIDTH = 16
OPTIONS = {
    "none": CheckpointSettings(),
    "cpu": CheckpointSettings(checkpoint_in_cpu=True),
    "contiguous": CheckpointSettings(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4),
    "contiguous on the cpu": CheckpointSettings(
        partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4, checkpoint_in_cpu=True
    ),
    "profile": CheckpointSettings(synchronize=True, profile=True),
}
Run = Callable[..., Any]


def direct(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """No checkpoint: what all others are compared with."""
    return function(*args, **kwargs)


class Block(nn.Module):
    """Dropout from the default state and, with a tracker, from its model-parallel one."""

    def __init__(self, tracker: CudaRNGStatesTracker | None = None, adapter: bool = False, p: float = 0.25) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.tracker, self.adapter, self.p = tracker, adapter, p
        if adapter:  # as LoRA has it: everything else is frozen
            self.requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), self.p)
        if self.tracker is not None:
            with self.tracker.fork():
                h = nn.functional.dropout(h, self.p)
        h = self.down(h)
        if self.adapter:
            h = h + self.b(self.a(x))
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        return x + (h if scale is None else h * scale)


def tracker() -> CudaRNGStatesTracker:
    """One with the default name, always of the same seed."""
    made = CudaRNGStatesTracker("cpu")
    made.add(DEFAULT_NAME, 5)
    return made


def blocks(number: int = 4, *args: Any, **kwargs: Any) -> nn.ModuleList:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.ModuleList(Block(*args, **kwargs) for _ in range(number))


def value(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)
