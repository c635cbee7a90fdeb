"""Parameters and gradients used where they are not whole: right where the docs say how, else an error by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.fsdp.gathered_parameters import GatheredParameters

STAGE_3 = Setting(3, "per_micro_batch")


def penalty(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for p in model.parameters():
        total = total + p.pow(3).sum()
    return total


def train_with_penalty(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        with training.scope():
            loss = loss_of(model(training.data(step, 2, 6)))
            with GatheredParameters(model.parameters()):
                loss = loss + 0.01 * penalty(model)
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
    if isinstance(training, ShardedTraining) and training.own.stage == 3:
        assert not any(bucket.gathered for unit in training.own.model.units for bucket in unit.buckets)


def test_a_penalty_on_gathered_parameters_is_exact_at_every_stage(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, train_with_penalty, DEFAULTS, tolerance=1e-6):
        assert not wrong


class TwoLosses(nn.Module):
    """Its forward uses weights beside their units: a penalty and layers, which are parts of both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, extra = self.net(x), 0.01 * penalty(self.net.blocks)
        last = self.net.blocks[-1]
        extra = extra + last.down(torch.tanh(last.up(x))).mean()
        return loss_of(out) + extra, out.mean() * extra


def train_with_several_backwards(training: PlainTraining) -> None:
    """Backwards of two losses of one forward, of two forwards in turn, and across a step on other weights."""
    model, other = TwoLosses(), nn.Linear(6, 6)
    with torch.no_grad():
        other.weight.fill_(0.1), other.bias.zero_()
    training.shard(nn.ModuleList([model, other]))
    training.attach(*(torch.optim.SGD(part.parameters(), lr=0.05) for part in (model, other)))
    for step in range(3):
        with training.scope():
            one, two = model(training.data(3 * step, 2, 6))
            third, _ = model(training.data(3 * step + 1, 2, 6))
        training.backward(one, retain_graph=True)
        training.backward(two)
        with training.scope():
            loss = loss_of(other(training.data(3 * step + 2, 2, 6)))
        training.backward(loss)
        training.step(training.optimizers[1])
        training.zero_grad(training.optimizers[1])
        training.backward(third)
        training.note(one, two, third, loss)
        training.step(training.optimizers[0])
        training.zero_grad()
    if isinstance(training, ShardedTraining) and training.own.stage == 3:
        assert not any(bucket.gathered for unit in training.own.model.units for bucket in unit.buckets)


def test_what_a_forward_has_read_serves_every_backward(ranks: Launcher) -> None:
    staying = Setting(3, "per_micro_batch", {"reshard_after_forward": False})
    for wrong in ranks(2)(play, train_with_several_backwards, [STAGE_3, staying, DEFAULTS[2]], tolerance=1e-6):
        assert not wrong


def complaints() -> list[str]:
    """Errors of losses that read released parameters outside of a forward."""
    training = ShardedTraining(STAGE_3)
    model = net()
    training.shard(model)
    x = training.data(0, 2, 6)
    good = loss_of(model(x))
    found = []
    losses: list[Callable[[], Tensor]] = [
        lambda: good + penalty(model.blocks[0]),
        lambda: good + model.blocks[0].up.weight.sum(),
        lambda: nn.functional.linear(x, model.blocks[1].up.weight).sum() + good,
    ]
    for loss in losses:
        try:
            loss()
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_a_loss_that_reads_released_parameters_is_refused(ranks: Launcher) -> None:
    for first, one, tied in ranks(2)(complaints):
        assert "'blocks.0.norm.weight' is released" in first and "GatheredParameters" in first
        assert "'blocks.0.up.weight' is released" in one
        assert "'blocks.1.up.weight' is released" in tied
