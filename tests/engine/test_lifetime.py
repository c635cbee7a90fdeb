"""Engines end: nothing keeps a dropped one alive, optimizers come and go, a failed meeting is over."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, PlainTraining, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.comm.store import BarrierError
from zero_strategy.fsdp.gathered_parameters import GatheredParameters


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=False)


def train_one(training: PlainTraining, step: int) -> None:
    loss = loss_of(training.module(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)
    training.step()
    training.zero_grad()


# ------------------------------------------------------------------------------------------------- collection


def watched_engine(stage: int, end: str) -> dict[str, weakref.ref[Any]]:
    """References to the parts of an engine that ends after a step, in the midst of one, or after `detach`."""
    training = ShardedTraining(DEFAULTS[stage])
    model = net()
    training.shard(model)
    training.attach(adamw(model.parameters()))
    train_one(training, 0)
    with torch.no_grad():
        model(training.data(0, 2, 6))
    with GatheredParameters(model.parameters(), modifier_rank=0):
        pass
    if end == "backward":
        loss_of(model(training.data(1, 2, 6))).backward()
    elif end == "forward":
        model(training.data(1, 2, 6))
    elif end == "detached":
        training.own.detach()
    parts = training.own.model
    watched: dict[str, Any] = {
        "module": model,
        "parameter": model.scale,
        "parameter of a unit": model.blocks[0].up.weight,
        "engine": training.own,
        "model": parts,
        "optimizer": training.optimizers[0],
        "reducer": parts.reducer,
        "gradients": parts.gradients[-1],
    }
    watched |= {f"bucket {number}": bucket for number, bucket in enumerate(parts.buckets)}
    watched |= {f"buffer {number}": bucket.flat for number, bucket in enumerate(parts.buckets)}
    return {f"{name}, {end}": weakref.ref(value) for name, value in watched.items()}


def survivors(stage: int) -> list[str]:
    """Objects that are alive after everything was dropped."""
    refs: dict[str, weakref.ref[Any]] = {}
    for end in ("step", "backward", "forward", "detached"):
        refs |= watched_engine(stage, end)
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dropped_engine_is_collected(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(survivors, stage) == [[], []]


def detached_survivors(stage: int) -> list[bool]:
    """Detached optimizers and their states are alive while the engine goes on."""
    training = ShardedTraining(DEFAULTS[stage])
    model = net()
    training.shard(model)
    alive = []
    for step in range(2):
        optimizer = adamw(model.parameters())
        training.attach(optimizer)
        train_one(training, step)
        moment = next(iter(training.own.optimizers[0].state.values()))["exp_avg"]
        refs = [weakref.ref(optimizer), weakref.ref(training.own.optimizers[0]), weakref.ref(moment)]
        training.own.detach()
        training.optimizers.clear()
        del optimizer, moment
        gc.collect()
        alive += [ref() is not None for ref in refs]
    return alive


@pytest.mark.parametrize("stage", [0, 3])
def test_a_detached_optimizer_is_collected(ranks: Launcher, stage: int) -> None:
    for alive in ranks(2)(detached_survivors, stage):
        assert alive == [False] * 6


# ------------------------------------------------------------------------------------------ detach and attach


def detach(training: PlainTraining) -> None:
    if isinstance(training, ShardedTraining):
        training.own.detach()
    training.optimizers.clear()


def other_optimizers_in_turn(training: PlainTraining) -> None:
    """Another class, other groups, the same object again: states are dropped, parameters go on."""
    model = net()
    training.shard(model)
    first = adamw(model.parameters())
    training.attach(first)
    train_one(training, 0)
    train_one(training, 1)
    detach(training)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train_one(training, 2)
    training.backward(loss_of(model(training.data(3, 2, 6))))  # a gradient stays for the next optimizers
    detach(training)
    training.attach(adamw(model.blocks.parameters()), adamw([*model.stem.parameters(), *model.head.parameters()]))
    model.scale.requires_grad_(False)
    training.note(*training.gradients())
    training.step()
    training.zero_grad()
    train_one(training, 4)
    detach(training)
    model.scale.requires_grad_(True)
    first.state.clear()  # what `detach` drops
    training.attach(first)
    model.scale.grad = None
    train_one(training, 5)
    train_one(training, 6)


def test_optimizers_are_detached_and_attached(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, other_optimizers_in_turn):
        assert not wrong


def traces_of_detached(stage: int) -> dict[str, Any]:
    """State that `detach` leaves on an optimizer: groups are the module's parameters, without hooks of the engine."""
    training = ShardedTraining(DEFAULTS[stage])
    model = net()
    training.shard(model)
    optimizer = adamw(model.parameters())
    before = hooks_of(optimizer)
    training.attach(optimizer)
    train_one(training, 0)
    during = hooks_of(optimizer)
    training.own.detach()
    mine = all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    return {
        "before": before,
        "during": during,
        "after": hooks_of(optimizer),
        "groups": mine,
        "state": len(optimizer.state),
    }


def hooks_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        len(getattr(optimizer, name))
        for name in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_load_state_dict_pre_hooks",
        )
    )


def test_detach_leaves_a_plain_optimizer(ranks: Launcher) -> None:
    for stage in (0, 3):
        for found in ranks(2)(traces_of_detached, stage):
            assert found["during"] > found["before"] == found["after"]
            assert found["groups"] and found["state"] == 0


# ------------------------------------------------------------------------------------------------- rendezvous


def meetings() -> list[str]:
    """Meetings that one rank misses, of either rank and twice in a row; those after them take place."""
    training = ShardedTraining(DEFAULTS[3])
    model = net()
    training.shard(model)
    training.own.mesh.barrier.timeout = 0.5
    expected = {name: value.clone() for name, value in net().state_dict().items()}
    found: list[str] = []
    for absent in ([1], [0], [1, 1]):
        for other in absent:
            if training.rank != other:
                try:
                    model.state_dict()
                    found.append("not noticed")
                except BarrierError as error:
                    if f"rank(s) [{other}] did not come" not in str(error):
                        found.append(str(error))
            dist.barrier()
        training.reset()
        state = model.state_dict()
        found += [name for name, value in expected.items() if not torch.equal(value, state[name])]
        with GatheredParameters(model.head.weight):
            if not torch.equal(model.head.weight, expected["head.weight"]):
                found.append("gathered")
        found += [
            name for name, value in training.own.full_state_dict().items() if not torch.equal(value, expected[name])
        ]
    return found


def test_meetings_go_on_after_one_that_failed(ranks: Launcher) -> None:
    assert ranks(2)(meetings) == [[], []]
