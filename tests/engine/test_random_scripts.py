"""Scripts drawn at random: branches that differ by rank, any mix of backwards, freezing, clearing, two optimizers."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Block, loss_of, seeded
from tests.engine.trainings import KEPT, SETTINGS, PlainTraining, Setting, play
from tests.launcher import Launcher

STEPS = 5


class Experts(nn.Module):
    """Any sequence of units, then a layer of the root; a parameter of the root and one in each unit may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.extra = nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, order: list[int], extra: bool) -> Tensor:
        x = x + self.extra if extra else x
        for number in order:
            x = self.experts[number](x, extra)
        return self.out(x)


class Expert(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = super().forward(x)
        return x * self.gain if extra else x


def random_script(training: PlainTraining, seed: int, branches: bool) -> None:
    """All ranks draw the same script; with `branches`, each its own way through the model."""
    common, own = random.Random(seed), random.Random(1000 * seed + (training.rank if branches else 0))
    model = seeded(Experts)
    frozen = [p for p in model.parameters() if common.random() < 0.15]
    for p in frozen:
        p.requires_grad_(False)
    training.shard(model)
    first = torch.optim.SGD(model.experts.parameters(), lr=0.02, momentum=0.9, foreach=False)
    second = torch.optim.SGD([model.extra, *model.out.parameters()], lr=0.02, momentum=0.5, foreach=False)
    training.attach(first, second)
    batch = 0
    for _ in range(STEPS):
        for p in frozen:
            p.requires_grad_(common.random() < 0.5)
        model.out.requires_grad_(True)
        for _ in range(common.randint(1, 4)):
            batch += 1
            order = [own.randrange(4) for _ in range(own.randint(0, 4))]
            extra = own.random() < 0.5
            output = model(training.data(batch, 2, 6), order, extra)
            sync, twice = common.random() < 0.5, common.random() < 0.2
            training.note(output)
            training.backward(loss_of(output), sync=sync, retain_graph=twice)
            if twice:
                training.backward(output.square().sum(), sync=common.random() < 0.5)
            what = common.random()
            if what < 0.1:
                training.zero_grad(set_to_none=common.random() < 0.5)
            elif what < 0.15:
                training.assign(model.out.bias, None)
            elif what < 0.2:
                training.assign(model.out.bias, torch.full((6,), 0.1))
            elif what < 0.3:
                with torch.no_grad():
                    training.note(model(training.data(batch, 2, 6), [0, 1], True))
            elif what < 0.4:
                training.note(
                    *torch.autograd.grad(loss_of(model(training.data(batch, 2, 6), [], True)), [model.out.weight])
                )
        if common.random() < 0.3:
            training.clip(1.0, optimizer=common.choice([first, second]))
        stepping = common.choice([[first], [second], [first, second], [first, second]])
        training.step(*stepping)
        training.zero_grad(*stepping, set_to_none=common.random() < 0.7)
    training.note(*training.gradients())


@pytest.mark.parametrize("seed", range(5))
def test_random_scripts(ranks: Launcher, seed: int) -> None:
    """Half of the settings with each script, by turns: a new script finds more than an old one with other settings."""
    script = partial(random_script, seed=seed, branches=False)
    for wrong in ranks(2)(play, script, [*SETTINGS, KEPT][seed % 2 :: 2], tolerance=2e-5):
        assert not wrong


@pytest.mark.parametrize("seed", range(100, 105))
def test_random_scripts_with_branches_by_rank(ranks: Launcher, seed: int) -> None:
    settings = [setting for setting in SETTINGS if setting.stage < 3]
    settings += [Setting(2, "per_step"), Setting(1, "per_micro_batch")]
    settings = settings[seed % 2 :: 2]  # one of the orders, by turns
    script = partial(random_script, seed=seed, branches=True)
    for world in (2, 3) if seed % 3 == 1 else (2,):
        for wrong in ranks(world)(play, script, settings, tolerance=2e-5):
            assert not wrong, world
