"""Gradients that come after their bucket has left: a block in several re-entrant checkpoints of one backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.nets import Block, loss_of, seeded
from tests.engine.trainings import DEFAULTS, SETTINGS, PlainTraining, Setting, play
from tests.launcher import Launcher


class Repeated(nn.Module):
    """Goes through all its blocks several times, every time in a checkpoint of its own."""

    def __init__(self, times: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.times = times
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        x = self.stem(x)
        for time in range(self.times):
            for number, block in enumerate(self.blocks):
                if (time, number) != (0, skip):
                    x = checkpoint(block, x, use_reentrant=True)
        out: Tensor = self.head(x)
        return out


def blocks_used_again(training: PlainTraining, times: int, micro: int) -> None:
    model = seeded(Repeated, times)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    for step in range(3):
        for number in range(micro):
            loss = loss_of(model(training.data(micro * step + number, 2, 6)))
            training.note(loss)
            training.backward(loss, sync=number == micro - 1)
        training.note(*training.gradients())
        training.clip(1.0)
        training.step()
        training.zero_grad()


def used_again_on_one_rank(training: PlainTraining) -> None:
    """Only one rank's block is used again: the other ranks reduce the late gradient with it (stages 0 to 2)."""
    model = seeded(Repeated)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    for step in range(4):
        loss = loss_of(model(training.data(step, 2, 6), step % 2 if training.rank == step // 2 else -1))
        training.backward(loss)
        training.note(*training.gradients())
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("micro", [1, 2])
def test_late_gradients_are_not_lost(ranks: Launcher, micro: int) -> None:
    """Blocks are used twice in a single micro-batch, and three times in each of two."""
    script = partial(blocks_used_again, times=micro + 1, micro=micro)
    for wrong in ranks(2)(play, script, SETTINGS, tolerance=1e-5):
        assert not wrong


def test_late_gradients_on_a_mesh_of_four(ranks: Launcher) -> None:
    settings = [Setting(s.stage, s.order, {"mesh": {"replicate": 2}}) for s in SETTINGS]
    for wrong in ranks(4)(play, partial(blocks_used_again, times=2, micro=1), settings, tolerance=1e-5):
        assert not wrong


def test_late_gradients_of_one_rank(ranks: Launcher) -> None:
    settings = [setting for setting in DEFAULTS if setting.stage < 3]
    for wrong in ranks(2)(play, used_again_on_one_rank, settings, tolerance=1e-5):
        assert not wrong
