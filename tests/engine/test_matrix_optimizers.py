"""Muon and other optimizers of whole matrices at stages 1 to 3, to the bit of plain torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from tests.engine.nets import loss_of, net, seeded
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.fsdp.packing import pack

MUON = {"matrix_optimizers": ["Muon"]}


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the blocks, and all others."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
    kept = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in kept]


def trained(training: PlainTraining, accumulation: int, clip: bool) -> None:
    model = net()
    training.shard(model)
    matrices, others = split(model)
    training.attach(
        Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, foreach=False),
    )
    for step in range(4):
        for micro in range(accumulation):
            loss = loss_of(model(training.data(accumulation * step + micro, 2, 6))) / accumulation
            training.note(loss)
            training.backward(loss)
        if clip:
            training.clip(0.5)
        training.step()
        training.zero_grad()


SETTINGS = [Setting(setting.stage, setting.order, MUON) for setting in DEFAULTS]


@pytest.mark.parametrize("accumulation, clip", [(1, False), (3, False), (1, True), (2, True)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_has_the_bits_of_plain_torch(ranks: Launcher, world: int, accumulation: int, clip: bool) -> None:
    script = partial(trained, accumulation=accumulation, clip=clip)
    for wrong in ranks(world)(play, script, SETTINGS, tolerance=1e-6 if clip else 0.0):
        assert not wrong
