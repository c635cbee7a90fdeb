"""What the ranks run that `doctor` starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.distributed.rows import gather_row


def factory() -> Any:
    """A small model, its optimizer, batches and loss, for `verify`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4))
    return model, _optimizer, [torch.randn(4, 16) for _ in range(4)], _loss


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def all_reduce() -> int:
    """All ranks meet; returns how many they are."""
    return len(gather_row([1.0]))
