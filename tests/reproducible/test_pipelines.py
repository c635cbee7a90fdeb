"""Bits of pipelines in slots: those of one plain engine, at any number of stages and copies, stage and schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launcher import Launcher
from tests.reproducible.pipelines import Found, Run, train
from zero_strategy.pipeline.schedules import SCHEDULES

ORDERS = ("per_step", "per_micro_batch")


def _runs(runs: list[Run]) -> list[Found]:
    torch.set_num_threads(1)
    return [train(run) for run in runs]


def _one_digest(ranks: Launcher, runs: dict[int, list[Run]]) -> None:
    found: dict[tuple[int, str], Any] = {}
    for world, own in runs.items():
        for rank, results in enumerate(ranks(world)(_runs, own)):
            found |= {(world, f"{rank} {run}"): result for run, result in zip(own, results, strict=True)}
    kinds = sorted({str(value) for value in found.values()})
    told = {f"{key} {value}" for key, value in found.items() if key[1].startswith("0")}
    assert len(kinds) == 1, "\n".join(sorted(told))


@pytest.mark.parametrize("optimizer", ["AdamW", "MuonAdamW"])
def test_pipelines_have_the_bits_of_one_plain_engine(ranks: Launcher, optimizer: str) -> None:
    """Over numbers of stages and copies, ZeRO stages, times of reduction, and recomputation."""

    def config(stage: int, order: str, **more: Any) -> dict[str, Any]:
        return {"stage": stage, "gradient_reduction": order, **more}

    runs = {
        1: [Run(0, optimizer=optimizer), Run(1, optimizer=optimizer), Run(0, interval=2, optimizer=optimizer)],
        2: [Run(2, config=config(s, o), interval=s, optimizer=optimizer) for s in (0, 1, 3) for o in ORDERS],
        4: [Run(2, config=config(s, o), optimizer=optimizer) for s in (0, 1, 3) for o in ORDERS],
    }
    runs[2] += [Run(n, config=config(3, "per_micro_batch"), optimizer=optimizer) for n in (0, 1)]
    runs[4] += [Run(4, config=config(s, "per_step"), optimizer=optimizer) for s in (0, 3)]
    _one_digest(ranks, runs)


@pytest.mark.parametrize("order", ORDERS)
def test_schedules_have_the_bits_of_one_plain_engine(ranks: Launcher, order: str) -> None:
    """Over all schedules, with one slot for each rank (4) or several (12), and recomputation."""
    config = {"gradient_reduction": order}
    for slots in (4, 12):
        common = {"slots": slots, "steps": 2}
        runs = {
            1: [Run(0, **common)],
            2: [Run(2, name, {"stage": 3, **config}, interval=1, **common) for name in SCHEDULES],
            4: [Run(2, name, {"stage": 1, **config}, **common) for name in ("zbv", "interleaved_zb")],
        }
        runs[4] += [Run(4, name, config, **common) for name in ("1f1b", "interleaved_1f1b", "zbv")]
        _one_digest(ranks, runs)
