"""Bytes that are kept: by mode full no more than the inputs of layers and what one layer needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.activation.alive import kept_by, peak_of
from tests.activation.unit_nets import Layer, seeded
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

WIDTH, DEPTH = 32, 12


class Stack(nn.Module):
    """Layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(mode: dict[str, Any]) -> nn.Module:
    model: nn.Module = seeded(Stack)
    ZeroEngine(model, load_config(stage=0, units={"min_numel": 0}, activation_checkpointing=mode))
    return model


def test_full_keeps_inputs_and_one_layer(ranks: Launcher) -> None:
    x = torch.randn(16, 64, WIDTH)
    layer = seeded(Layer, WIDTH)
    one = kept_by(lambda: layer(x), layer)
    model = sharded({"mode": "full"})
    assert kept_by(lambda: model(x), model) <= 1.05 * DEPTH * x.nbytes
    # In backward gradients come on top: of parameters, and the one that is passed on with what an op makes of it.
    weights = sum(p.nbytes for p in model.parameters())
    passed_on = 2 * 4 * x.nbytes
    assert peak_of(model, x) <= 1.05 * (DEPTH * x.nbytes + one) + weights + passed_on
    none = sharded({"mode": "none"})
    assert kept_by(lambda: none(x), none) >= 0.95 * DEPTH * one


def test_selective_keeps_less_than_all_and_more_than_inputs(ranks: Launcher) -> None:
    x = torch.randn(16, 64, WIDTH)
    full, selective, none = (peak_of(sharded({"mode": mode}), x) for mode in ("full", "selective", "none"))
    assert full < selective < 0.8 * none
