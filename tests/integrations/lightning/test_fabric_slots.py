"""Slots under Fabric: the bits of the engine on any number of ranks, its resume on others, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tests.integrations.lightning.test_fabric import fabric
from tests.launcher import Launcher
from tests.reproducible.samples import Masked, Samples, collate
from tests.reproducible.training import ROWS, SEED, Case, build, digest_of, train
from zero_strategy.integrations import strategy_class

SLOTS = 4
STAGES = (1, 3)


class Script:
    """Objects of a script.

    Args:
        stage: Of ZeRO.
        slots: Of a step.
        flags: Of Fabric.
    """

    def __init__(self, stage: int, slots: int = SLOTS, **flags: Any) -> None:
        torch.set_num_threads(1)
        steps = {"slots": slots, "seed": SEED}
        strategy = strategy_class("lightning.fabric")(stage=stage, reproducible=steps, loss_scale={"initial": 1024.0})
        self.fabric, self.module = fabric(strategy, **flags), build()
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(self.module, optimizer)
        (self.engine,) = strategy.engines
        self.norms: list[float] = []

    def run(self, batches: Any, most: int = 1 << 30) -> None:
        for tokens in batches:
            self.fabric.backward(self.model(tokens))
            if self.engine.slots.complete:
                self.norms.append(float(self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)))  # type: ignore[arg-type]
                self.optimizer.step()
                self.optimizer.zero_grad()
                if len(self.norms) == most:
                    return

    @property
    def result(self) -> tuple[str, list[float]]:
        return digest_of(self.engine), self.norms


def changed(slots: int = SLOTS, steps: int = 3) -> Any:
    return Masked(Subset(Samples(slots, steps), range(3, steps * slots * ROWS)))


def in_order() -> list[tuple[str, list[float]]]:
    found = []
    for stage in STAGES:
        script, data = Script(stage), Samples(SLOTS, 3)
        loader = DataLoader(data, ROWS, sampler=script.engine.slots.sampler(data, ROWS, shuffle=False))
        script.run(script.fabric.setup_dataloaders(loader, use_distributed_sampler=False))
        found.append(script.result)
    return found


def shuffled(slots: int, epochs: int, **flags: Any) -> list[tuple[str, list[float]]]:
    found = []
    for stage in STAGES:
        script = Script(stage, slots, **flags)
        loader = DataLoader(changed(slots), ROWS, shuffle=True, collate_fn=collate)
        train, others = script.fabric.setup_dataloaders(loader, DataLoader(Samples(2, 2), ROWS))
        for _ in range(epochs):
            script.run(train)
            with torch.no_grad():
                assert len([script.model(tokens) for tokens in others]) == len(others)
        found.append(script.result)
    return found


def by_engine_alone() -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    result = train(Case({"stage": 0}, slots=SLOTS))
    return result.digest, result.norms


def test_fabric_trains_slots_as_the_engine_on_any_ranks(ranks: Launcher) -> None:
    expected = ranks(1)(by_engine_alone)[0]
    for world in (1, 2, 4):
        for found in ranks(world)(in_order):
            assert found == [expected] * len(STAGES), world


@pytest.mark.parametrize(("slots", "worlds"), [(4, (1, 2, 4)), (6, (1, 3))])
def test_fabric_shuffles_and_draws_by_slots(ranks: Launcher, slots: int, worlds: tuple[int, ...]) -> None:
    every = [one for world in worlds for rank in ranks(world)(shuffled, slots, 2) for one in rank]
    assert all(one == every[0] for one in every), [(one[0][:8], one[1]) for one in every]
    assert len(every[0][1]) == 6


def test_fabric_has_slots_in_fp16(ranks: Launcher) -> None:
    every = [one for world in (1, 2) for rank in ranks(world)(shuffled, 4, 1, precision="16-true") for one in rank]
    assert all(one == every[0] for one in every), [(one[0][:8], one[1]) for one in every]


def part_of(folder: str, first: int, until: int) -> tuple[str, list[float]]:
    """Steps of an epoch of four, from one that is saved up to another, which is saved then."""
    script = Script(3)
    loader: Any = script.fabric.setup_dataloaders(DataLoader(changed(steps=4), ROWS, shuffle=True))
    state = {"model": script.model, "optimizer": script.optimizer}
    if first:
        script.fabric.load(f"{folder}/{first}", state)
    loader.sampler.start_at(script.engine.steps.taken)
    script.run(loader, until - first)
    script.fabric.save(f"{folder}/{until}", state)
    return script.result


def test_fabric_resumes_slots_on_other_ranks(ranks: Launcher, tmp_path: Path) -> None:
    whole, norms = ranks(2)(part_of, str(tmp_path / "whole"), 0, 4)[0]
    folder, found, last, before = str(tmp_path / "parts"), [], "", 0
    for world, until in ((2, 1), (1, 2), (4, 4)):
        last, more = ranks(world)(part_of, folder, before, until)[0]
        found, before = found + more, until
    assert found == norms and last == whole


def refused_by_fabric(what: str) -> str:
    script, data = Script(1), Samples(SLOTS, 2)
    try:
        if what == "evaluation":
            script.run(script.fabric.setup_dataloaders(DataLoader(data, ROWS)))
        else:
            loader = script.fabric.setup_dataloaders(DataLoader(data, ROWS, shuffle=True))
            for tokens in loader:
                script.fabric.backward(script.model(tokens))
                script.optimizer.step()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("evaluation", ["slots is 4", "by their number", "use_distributed_sampler=False"]),
        ("early step", ["after 1 of 2 micro-batches", "slots is 4"]),
    ],
)
def test_fabric_refuses_what_is_no_step_of_slots(ranks: Launcher, what: str, parts: list[str]) -> None:
    for found in ranks(2)(refused_by_fabric, what):
        assert found.startswith("RuntimeError") and all(part in found for part in parts), found
