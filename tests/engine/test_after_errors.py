"""After an exception outside of the engine: what is left of gradients, and that training goes on right."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, Script, ShardedTraining, play
from tests.launcher import Launcher


def fail(*_: Any, **__: Any) -> None:
    raise KeyError("a hook of the user")


def start(training: PlainTraining) -> Net:
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    return model


def train_one(training: PlainTraining, step: int) -> None:
    loss = loss_of(training.module(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)
    training.step()
    training.zero_grad()


def a_state_dict_that_raises(training: PlainTraining) -> None:
    """A hook of a unit raises while the unit is held whole for `state_dict`."""
    model = start(training)
    for step, part in enumerate([model.blocks[0], model.head, model]):
        train_one(training, 2 * step)
        handle = part.register_state_dict_pre_hook(fail)
        with contextlib.suppress(KeyError):
            model.state_dict()
        handle.remove()
        if step:
            training.reset()
        train_one(training, 2 * step + 1)
        training.note(*model.state_dict().values())


def a_step_that_raises(training: PlainTraining) -> None:
    """Gradients of a step that a hook prevented are cleared, or used, like any others."""
    model = start(training)
    for step in range(4):
        train_one(training, 3 * step)
        training.backward(loss_of(model(training.data(3 * step + 1, 2, 6))))
        for optimizer in training.optimizers:
            handle = optimizer.register_step_pre_hook(fail)
            with contextlib.suppress(KeyError):
                training.step()
            handle.remove()
        training.reset()
        if step % 2:
            training.zero_grad()
        train_one(training, 3 * step + 2)


def backward_after_a_step_that_raised(stage: int) -> str:
    """The error of going on without telling the engine; after `reset` training goes on."""
    training = ShardedTraining(DEFAULTS[stage])
    model = start(training)
    group = training.optimizers[0].param_groups[0]
    training.backward(loss_of(model(training.data(0, 2, 6))))
    rate, group["lr"] = group["lr"], None
    with contextlib.suppress(TypeError):
        training.step()
    group["lr"] = rate
    training.zero_grad()
    message = ""
    try:
        training.backward(loss_of(model(training.data(1, 2, 6))))
    except RuntimeError as error:
        message = str(error)
    training.own.reset()
    training.zero_grad()
    train_one(training, 2)
    return message


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_torn_step_is_named(ranks: Launcher, stage: int) -> None:
    """`zero_grad` after a step that raised does not reach the module: the next backward says so."""
    for message in ranks(2)(backward_after_a_step_that_raised, stage):
        assert "engine.reset()" in message


SCRIPTS: list[Script] = [a_state_dict_that_raises, a_step_that_raises]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_training_goes_on(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script, DEFAULTS):
        assert not wrong


class Torn(torch.autograd.Function):
    """Raises in the midst of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("in backward")


def torn_micro_batch(stage: int) -> dict[str, Any]:
    """Two whole micro-batches, then one that is torn: none of their gradients is left in part."""
    training = ShardedTraining(DEFAULTS[stage])
    model = start(training)
    for step in range(2):
        loss_of(model(training.data(step, 2, 6))).backward()
    before = [training.gradient(p) is not None for p in model.parameters()]
    with contextlib.suppress(KeyError):
        x = model.blocks[0](model.stem(training.data(2, 2, 6)))
        loss_of(model.head(model.blocks[2](model.blocks[1](Torn.apply(x))))).backward()
    training.reset()
    after = [training.gradient(p) is None and p.grad is None for p in model.parameters()]
    loss_of(model(training.data(3, 2, 6))).backward()
    plain, by_hand = net(), PlainTraining(training.setting)
    by_hand.shard(plain)
    by_hand.backward(loss_of(plain(training.data(3, 2, 6))))
    wrong = []
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient, expected = training.gradient(p), by_hand.gradient(q)
        if gradient is None or expected is None or not torch.equal(gradient, expected):
            wrong.append(name)
    return {"before": all(before), "after": all(after), "wrong": wrong}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reset_drops_the_micro_batches_of_a_torn_step_whole(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(torn_micro_batch, stage):
        assert found == {"before": True, "after": True, "wrong": []}


def incomplete_optimizer(stage: int) -> list[bool]:
    """The first step is refused, as parameters are missing; the groups still hold the module's parameters."""
    training = ShardedTraining(DEFAULTS[stage])
    model = net()
    training.shard(model)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    training.attach(optimizer)
    loss_of(model(training.data(0, 2, 6))).backward()
    refused = False
    try:
        optimizer.step()
    except ValueError as error:
        refused = "in no optimizer" in str(error)
    held: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    return [refused, all(a is b for a, b in zip(held, model.blocks.parameters(), strict=True))]


def test_a_refused_step_leaves_the_groups_alone(ranks: Launcher) -> None:
    for stage in (0, 1, 3):
        assert ranks(2)(incomplete_optimizer, stage) == [[True, True]] * 2
