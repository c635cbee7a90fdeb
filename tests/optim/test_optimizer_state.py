"""The state of every optimizer through checkpoints and whole dicts, next to a plain training that keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "ASGD": partial(torch.optim.ASGD, lr=0.05, lambd=0.1, t0=1.0),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adam, tensor lr": partial(torch.optim.Adam, lr=torch.tensor(0.05)),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.05),
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
    "RAdam": partial(torch.optim.RAdam, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
}


def train_one(training: PlainTraining, step: int) -> None:
    loss = loss_of(training.module(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)
    training.step()
    training.zero_grad()


def saved_and_loaded(training: PlainTraining, name: str, frozen: bool, folder: str) -> None:
    """The sharded training spoils what it has after each save and each copy, and loads it back."""
    model = net(depth=2)
    for p in [model.stem.weight, *model.blocks[1].parameters()] if frozen else []:
        p.requires_grad_(False)
    training.shard(model)
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    for group in optimizer.param_groups:
        group["foreach"] = False
    training.attach(optimizer)
    train_one(training, 0)
    for round_ in range(2):
        train_one(training, 1 + round_)
        if isinstance(training, ShardedTraining):
            spoil = partial(_spoil, model, optimizer, 50 + round_)
            path = f"{folder} {training.setting.stage} {training.setting.order} {round_}"
            if round_:
                weights, state = training.own.full_state_dict(), training.own.optimizer_state_dict(optimizer)
                spoil()
                model.load_state_dict(weights)
                training.own.load_optimizer_state_dict(optimizer, state)
            else:
                training.own.save(path)
                spoil()
                training.own.load(path)
    train_one(training, 4)


def _spoil(model: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    loss_of(model(torch.randn(2, 6, generator=generator))).backward()
    optimizer.step()
    optimizer.zero_grad()


def every_state(folder: str) -> dict[str, Any]:
    """Optimizers at stages in turn; by name, what came out differently."""
    found: dict[str, Any] = {}
    for number, name in enumerate(OPTIMIZERS):
        script = partial(saved_and_loaded, name=name, frozen=number % 3 == 0, folder=f"{folder}/{number}")
        wrong = play(script, [DEFAULTS[(1, 3, 0, 2)[number % 4]]])
        if wrong:
            found[name] = wrong
    return found


def test_every_state_survives(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(2)(every_state, str(tmp_path)):
        assert not wrong


def test_adam_before_adamw(ranks: Launcher) -> None:
    """torch wraps `step` of whichever class is made first; AdamW inherits Adam's."""
    for outcome in ranks(1)(adam_first):
        assert outcome == ""


def adam_first() -> str:
    own = vars(torch.optim.AdamW).get("step")
    if own is not None:  # put there by an AdamW that was made earlier in this process
        del torch.optim.AdamW.step
    try:
        torch.optim.Adam([nn.Parameter(torch.zeros(1))])
        for stage in (0, 1, 3):
            model = net()
            engine = ZeroEngine(model, load_config(stage=stage))
            optimizer = torch.optim.AdamW(model.parameters())
            if "step" in vars(torch.optim.AdamW):
                return "this torch wraps AdamW.step by itself: the case is not made"
            engine.attach(optimizer)
            loss_of(model(torch.ones(2, 6))).backward()
            optimizer.step()
    except (KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if own is not None:
            torch.optim.AdamW.step = own  # type: ignore[method-assign]
    return ""


def without_state(folder: str, stage: int) -> list[int]:
    """Number of parameters with state: after training, and after loading what was saved before it."""
    training = ShardedTraining(Setting(stage, "per_micro_batch"))
    model = net()
    training.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    training.attach(optimizer)
    training.own.save(folder)
    expected = training.own.full_state_dict()
    train_one(training, 0)
    trained = len(training.own.full_optimizer_state(optimizer))
    training.own.load(folder)
    loaded = len(training.own.full_optimizer_state(optimizer))
    changed = [n for n, value in training.own.full_state_dict().items() if not torch.equal(value, expected[n])]
    return [trained, loaded, len(changed)]


def part_of_state(folder: str) -> dict[str, str]:
    """Optimizers as a user makes them, of which some or all parameters have no state; by case, what went wrong."""
    found = {}
    for stage in (0, 1, 2, 3):
        for name, make in {
            "none": partial(torch.optim.SGD, lr=0.05),
            "some": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            "some of Adam": partial(torch.optim.AdamW, lr=0.05),
        }.items():
            path = f"{folder}/{stage} {name}"
            losses = [_losses(stage, make, path, resumed) for resumed in ("", "directory", "whole")]
            if losses[1] != losses[0][2:] or losses[2] != losses[0][2:]:
                found[path] = str(losses)
    return found


def _losses(stage: int, make: Make, path: str, resumed: str) -> list[float]:
    torch.manual_seed(0)
    model = net(depth=2)
    engine = ZeroEngine(model, load_config(stage=stage))
    optimizer = make(model.parameters())
    engine.attach(optimizer)
    if resumed == "directory":
        engine.load(path)
    elif resumed:
        held = torch.load(f"{path}.{dist.get_rank()}.pt")
        model.load_state_dict(held["model"])
        engine.load_optimizer_state_dict(optimizer, held["optimizer"])
    losses = []
    for step in range(2 if resumed else 0, 4):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        loss = loss_of(model.blocks[0](model.stem(x)))  # the second block and the head get no gradients
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            engine.save(path)
            state = {"model": engine.full_state_dict(), "optimizer": engine.optimizer_state_dict(optimizer)}
            torch.save(state, f"{path}.{dist.get_rank()}.pt")
    engine.close()
    return losses


def test_optimizers_with_part_of_a_state_or_none(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(part_of_state, str(tmp_path)) == [{}, {}]


def test_a_checkpoint_without_state_clears_it(ranks: Launcher, tmp_path: Path) -> None:
    for stage in (0, 1, 3):
        for trained, loaded, changed in ranks(2)(without_state, str(tmp_path / str(stage)), stage):
            assert trained > 10 and loaded == 0 and changed == 0


def other_family(folder: str) -> str:
    training = ShardedTraining(Setting(1, "per_micro_batch"))
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05))
    train_one(training, 0)
    training.own.save(folder)
    other = net()
    engine = ZeroEngine(other, load_config(stage=1))
    engine.attach(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    try:
        engine.load(folder)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_the_state_of_another_kind_of_optimizer_is_refused(ranks: Launcher, tmp_path: Path) -> None:
    for message in ranks(2)(other_family, str(tmp_path / "c")):
        assert "['betas']" in message and "SGD has ['momentum']" in message


class Counting(Net):
    """Keeps a number outside of parameters and buffers."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def extra_state(folder: str, stage: int) -> list[Any]:
    training = ShardedTraining(Setting(stage, "per_micro_batch"))
    model = Counting()
    training.shard(model)
    model.calls = 7
    training.own.save(folder)
    model.calls = 1
    training.own.load(folder)
    loaded = model.calls
    model.calls = 9
    state = model.state_dict()
    model.calls = 2
    model.load_state_dict(state)
    return [loaded, model.calls]


def test_optimizer_state_extra_state_of_modules(ranks: Launcher, tmp_path: Path) -> None:
    for stage in (0, 3):
        assert ranks(2)(extra_state, str(tmp_path / str(stage)), stage) == [[7, 9]] * 2
