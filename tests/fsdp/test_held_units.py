"""Units that are held whole while an optimizer steps show the new values, as plain modules do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, Script, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.released import is_released
from zero_strategy.optim.full_state import safe_set_full_fp32_param

LONGER = [Setting(3, "per_micro_batch", {"reshard_after_forward": False}), KEPT]


def start(training: PlainTraining, lr: float = 0.1) -> Net:
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=lr, foreach=False))
    return model


def hold(training: PlainTraining, *parts: nn.Module, modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """`GatheredParameters` for the sharded training; plain parameters are whole anyway."""
    if not isinstance(training, ShardedTraining):
        return nullcontext()
    return GatheredParameters([p for part in parts for p in part.parameters()], modifier_rank)


def train_one(training: PlainTraining, model: nn.Module, step: int) -> None:
    loss = loss_of(model(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)
    training.step()
    training.zero_grad()


def steps_in_a_scope(training: PlainTraining) -> None:
    """Manual optimization: the root is held by the scope while the optimizer steps."""
    model = start(training)
    for step in range(3):
        with training.scope():
            for micro in range(2):
                train_one(training, model, 2 * step + micro)
                training.note(model.scale, model.head.weight)
            training.note(model.scale * model.head(training.data(step, 2, 6)))


def steps_inside_gathered_parameters(training: PlainTraining) -> None:
    model = start(training)
    for round_, parts in enumerate([[model], [model.blocks[1]], [model.head, model.blocks[0], model.blocks[2]]]):
        with hold(training, *parts):
            for step in range(2):
                train_one(training, model, 2 * round_ + step)
                training.note(*[p for part in parts for p in part.parameters()])


def modifier_rank_after_a_step(training: PlainTraining) -> None:
    """Changes of the step are kept, and changes of the rank on top of it."""
    model = start(training)
    for step in range(3):
        with hold(training, model.blocks[step], model.head, modifier_rank=step % 2):
            train_one(training, model, step)
            with torch.no_grad():
                if not isinstance(training, ShardedTraining) or training.rank == step % 2:
                    model.head.bias.add_(0.5 * step)
    train_one(training, model, 3)


def part_of_the_parameters_steps(training: PlainTraining) -> None:
    """One of two optimizers steps while everything is held."""
    model = net()
    training.shard(model)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.3)
    rest = torch.optim.AdamW([*model.stem.parameters(), *model.head.parameters(), model.scale], lr=0.1, foreach=False)
    training.attach(body, rest)
    for step in range(4):
        with training.scope(), hold(training, model):
            loss = loss_of(model(training.data(step, 2, 6)))
            training.backward(loss)
            training.step(body if step % 2 else rest)
            training.note(*model.parameters())
            training.note(model(training.data(10 + step, 2, 6)))
            training.zero_grad()


def values_set_while_held(training: PlainTraining) -> None:
    """Other updates than an optimizer's: a state dict, and a value for the master."""
    model = start(training)
    others = net(seed=4).state_dict()
    for step in range(2):
        with hold(training, model):
            train_one(training, model, step)
            model.load_state_dict({name: value * (step + 1) for name, value in others.items()})
            training.note(*model.parameters(), model(training.data(20, 2, 6)))
            new = torch.full_like(model.head.weight, 0.25)
            if isinstance(training, ShardedTraining):
                safe_set_full_fp32_param(model.head.weight, new)
            else:
                model.head.weight.data.copy_(new)
            training.note(*model.parameters(), model(training.data(21, 2, 6)))
            train_one(training, model, 5 + step)


def interrupted_forwards(training: PlainTraining, error: type[BaseException], reset: bool) -> None:
    """An exception leaves a forward; nobody needs to tell the engine for values to be right."""
    model = start(training)

    def fail(*_: Any) -> None:
        raise error

    for step, place in enumerate([model.blocks[1].up, model.head, model.blocks[0], model.stem]):
        train_one(training, model, 3 * step)
        handle = place.register_forward_pre_hook(fail)
        with contextlib.suppress(error), training.scope() if step == 1 else nullcontext():
            model(training.data(3 * step + 1, 2, 6))
        with contextlib.suppress(error), torch.no_grad():
            model(training.data(3 * step + 1, 2, 6))
        handle.remove()
        if reset:
            training.reset()
        for later in range(2):
            train_one(training, model, 3 * step + 1 + later)
        with torch.no_grad():
            training.note(model(training.data(50, 2, 6)))


SCRIPTS: list[Script] = [
    steps_in_a_scope,
    steps_inside_gathered_parameters,
    modifier_rank_after_a_step,
    part_of_the_parameters_steps,
    values_set_while_held,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_held_values_follow_every_update(ranks: Launcher, script: Script) -> None:
    for wrong in ranks(2)(play, script, [*DEFAULTS, *LONGER]):
        assert not wrong


# Without a reset, an error of the other kind has to be tried where units are released only.
INTERRUPTED: dict[type[BaseException], dict[bool, list[Setting]]] = {
    KeyboardInterrupt: {False: [*DEFAULTS, *LONGER]},
    ValueError: {False: [DEFAULTS[3], *LONGER], True: [*DEFAULTS, *LONGER]},
}


@pytest.mark.parametrize("error", INTERRUPTED)
def test_values_stay_fresh_after_an_interrupted_forward(ranks: Launcher, error: type[BaseException]) -> None:
    for reset, settings in INTERRUPTED[error].items():
        for wrong in ranks(2)(play, partial(interrupted_forwards, error=error, reset=reset), settings):
            assert not wrong, f"reset: {reset}"


def released_again(call: str) -> dict[str, list[bool]]:
    """Units that are whole: after an interrupted call, and after `reset`."""
    training = ShardedTraining(Setting(3, "per_micro_batch"))
    model = start(training)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    part = model.blocks[1].up
    register = part.register_forward_pre_hook if call == "forward" else part.register_state_dict_pre_hook
    handle = register(fail)
    with contextlib.suppress(KeyboardInterrupt):
        model(training.data(0, 2, 6)) if call == "forward" else model.state_dict()
    handle.remove()
    found = {"interrupted": [unit.gathered for unit in training.own.model.units]}
    training.reset()
    found["reset"] = [not is_released(p) for p in model.parameters()]
    return found


def test_reset_releases_what_an_interrupt_left_whole(ranks: Launcher) -> None:
    for call in ("forward", "state_dict"):
        for found in ranks(2)(released_again, call):
            assert any(found["interrupted"]), "else there is nothing to release"
            assert not any(found["reset"]), call


def second_backwards(make: Callable[[PlainTraining], Net], stage: int | None) -> str:
    """The error of a backward through values that a step has replaced, or 'silent'."""
    training = PlainTraining(DEFAULTS[0]) if stage is None else ShardedTraining(DEFAULTS[stage])
    model = make(training)
    loss: Tensor = loss_of(model(training.data(0, 2, 6)))
    loss.backward(retain_graph=True)
    for optimizer in training.optimizers:
        optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "silent"


def test_a_backward_through_replaced_values_is_an_error_as_in_plain_torch(ranks: Launcher) -> None:
    for stage in (None, 0, 1, 2, 3):
        for message in ranks(2)(second_backwards, start, stage):
            assert "modified by an inplace operation" in message, stage
