"""Hooks around an optimizer's step run in torch's order, whatever was registered when, and once per step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, Script, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import FusedAdamW


def train_one(training: PlainTraining, step: int) -> None:
    training.backward(loss_of(training.module(training.data(step, 2, 6))))
    training.step()
    training.zero_grad()


def sgd(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)


def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def rates_change(training: PlainTraining, early: bool) -> None:
    """A pre hook's new rate is that of the step that it comes before."""
    model = net()
    training.shard(model)
    optimizer = sgd(model)
    if early:
        optimizer.register_step_pre_hook(halve)
    training.attach(optimizer)
    if not early:
        optimizer.register_step_pre_hook(halve)
    for step in range(3):
        train_one(training, step)


def sums_and_clamps(training: PlainTraining, early: bool) -> None:
    """A post hook sees the new weights whole, and what it writes counts (stages 0 to 2)."""
    model = net()
    training.shard(model)
    optimizer = sgd(model)

    @torch.no_grad()
    def look(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in stepped.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        training.note(torch.stack([p.sum() for p in held]))
        for p in held:
            p.clamp_(-0.3, 0.3)

    if early:
        optimizer.register_step_post_hook(look)
    training.attach(optimizer)
    if not early:
        optimizer.register_step_post_hook(look)
    for step in range(3):
        train_one(training, step)


class Clamped(torch.optim.AdamW):
    """Does more than its base class in a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.3, 0.3)
        return loss


class FusedTwice(FusedAdamW):
    """A subclass whose base has the rule."""

    def step(self, closure: Any = None, *, grad_scale: float = 1.0) -> Any:
        return super().step(closure, grad_scale=grad_scale)


def a_step_in_a_step(training: PlainTraining, kind: type[torch.optim.Optimizer]) -> None:
    """Torch hooks the base class's step too, once an optimizer of that class was made."""
    made: Any = kind.__mro__[1]
    made(net().parameters())
    model = net()
    training.shard(model)
    optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    training.attach(optimizer)
    for step in range(3):
        train_one(training, step)


def scripts() -> dict[str, tuple[Script, list[int]]]:
    """By name: a script, and the stages at which it is played."""
    found: dict[str, tuple[Script, list[int]]] = {}
    for early in (True, False):
        divided = 1 if early else 2  # whose steps are alike
        found[f"rates, {early}"] = (lambda training, early=early: rates_change(training, early)), [0, divided, 3]
        found[f"clamps, {early}"] = (lambda training, early=early: sums_and_clamps(training, early)), [0, divided]
    for kind in (Clamped, FusedTwice):
        found[kind.__name__] = (lambda training, kind=kind: a_step_in_a_step(training, kind)), [0, 1, 3]
    return found


def wrong_scripts() -> dict[str, Any]:
    found = {name: play(script, [DEFAULTS[stage] for stage in stages]) for name, (script, stages) in scripts().items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_hooks_of_users_count(ranks: Launcher) -> None:
    assert ranks(2)(wrong_scripts) == [{}, {}]


def calls(stage: int, kind: str) -> dict[str, Any]:
    """In order: what was called, with whether the groups held the module's parameters, and its weights."""
    found: list[str] = []
    model = net()
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    mine = {id(p) for p in model.parameters()}
    optimizer: torch.optim.Optimizer
    if kind == "nested":
        torch.optim.AdamW(net().parameters())
        optimizer = Clamped(model.parameters(), lr=0.05)
    else:
        optimizer = sgd(model)

    def say(what: str) -> Callable[..., None]:
        def hook(stepped: torch.optim.Optimizer, *_: Any) -> None:
            whole = all(id(p) in mine for group in stepped.param_groups for p in group["params"])
            found.append(f"{what} {engine.steps.taken}" + ("" if whole else " in pieces"))

        return hook

    handles = [
        register_optimizer_step_pre_hook(say("global pre")),
        optimizer.register_step_pre_hook(say("early pre")),
        optimizer.register_step_post_hook(say("early post")),
    ]
    engine.attach(optimizer)
    handles += [
        optimizer.register_step_pre_hook(say("late pre")),
        optimizer.register_step_post_hook(say("late post")),
        register_optimizer_step_post_hook(say("global post")),
    ]
    try:
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        first, found = found, []
        handles[1].remove()
        handles[4].remove()
        optimizer.zero_grad()
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        second, found = found, []
        engine.detach()
        engine.attach(optimizer)
        optimizer.zero_grad()
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        return {"first": first, "second": second, "third": found}
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_step_hooks_run_in_torchs_order(ranks: Launcher, stage: int) -> None:
    """Before the engine's begin no step was counted, after its end one more; handles of before work."""
    for found in ranks(2)(calls, stage, "plain"):
        assert found["first"] == [
            "global pre 0", "early pre 0", "late pre 0", "early post 1", "late post 1", "global post 1",
        ]  # fmt: skip
        assert found["second"] == ["global pre 1", "late pre 1", "early post 2", "global post 2"]
        assert found["third"] == ["global pre 2", "late pre 2", "early post 3", "global post 3"]


def test_step_hooks_run_once_in_nested_steps(ranks: Launcher) -> None:
    """The optimizer's own are around the outermost call; torch calls the global ones in both."""
    for found in ranks(2)(calls, 2, "nested"):
        own = [each for each in found["first"] if not each.startswith("global")]
        assert own == ["early pre 0", "late pre 0", "early post 1", "late post 1"]


def steps_that_raise() -> list[str]:
    """After a step that raised, in itself and within its base's, the next one is a step of its own."""
    torch.optim.AdamW(net().parameters())
    found = []
    for kind in (Clamped, torch.optim.AdamW):
        training = ShardedTraining(DEFAULTS[1])
        model = net()
        training.shard(model)
        optimizer = kind(model.parameters(), lr=0.05)
        training.attach(optimizer)
        group = optimizer.param_groups[0]
        training.backward(loss_of(model(training.data(0, 2, 6))))
        rate, group["lr"] = group["lr"], None
        with pytest.raises(TypeError) as caught:
            training.step()
        group["lr"] = rate
        training.own.reset()
        training.zero_grad()
        seen: list[Tensor] = []
        handle = optimizer.register_step_post_hook(lambda *_, seen=seen, model=model: seen.append(model.scale.detach()))
        before = model.scale.item()
        train_one(training, 1)  # while the traceback keeps the frames of the step that raised
        assert caught.traceback
        handle.remove()
        if training.own.steps.taken != 1 or len(seen) != 1 or seen[0].item() == before:
            found.append(kind.__name__)
    return found


def test_a_step_after_one_that_raised_is_whole(ranks: Launcher) -> None:
    assert ranks(2)(steps_that_raise) == [[], []]


def kept_alive() -> bool:
    """True if an optimizer outlives its engine and all names of it."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=1))
    optimizer = sgd(model)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    held = weakref.ref(optimizer)
    engine.detach()
    del optimizer
    gc.collect()
    return held() is not None


def test_step_hooks_keep_nothing_alive(ranks: Launcher) -> None:
    assert ranks(1)(kept_alive) == [False]
