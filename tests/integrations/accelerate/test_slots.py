"""Slots under Accelerate: the bits of a training on any number of processes, its resume on others, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integrations.accelerate.slots import Trained, train_and_save, train_slots
from tests.launcher import Launcher
from tests.reproducible.training import Case, train

STAGES: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}]


def by_engine(slots: int) -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    result = train(Case({"stage": 0}, slots=slots))
    return result.digest, result.norms


def one(found: list[list[list[Trained]]]) -> Trained:
    """The one result of all runs, ranks and configs."""
    every = [each for run in found for rank in run for each in rank]
    assert all(each == every[0] for each in every), [(e.digest[:8], e.losses, e.norms) for e in every]
    return every[0]


def test_accelerate_trains_slots_as_the_engine_on_any_ranks(ranks: Launcher) -> None:
    found = one([ranks(world)(train_slots, 4, STAGES) for world in (1, 2, 4)])
    digest, norms = ranks(1)(by_engine, 4)[0]
    assert (found.digest, found.norms) == (digest, norms)
    assert len(found.norms) == 3 and found.norms[0] > 0.5, "clipping was at work"


def test_accelerate_shuffles_and_draws_by_slots(ranks: Launcher) -> None:
    """Samples and collations with random changes, noise before a forward, a schedule, a last step that is filled."""
    found = one([ranks(world)(train_slots, 4, STAGES, epochs=2, shuffle=True) for world in (1, 2, 4)])
    assert len(found.losses) == 6 and found.losses[:3] != found.losses[3:]
    assert found.rates == [0.01 * 0.9**step for step in range(1, 7)] or len(set(found.rates)) == 6


def test_accelerate_has_slots_on_three_ranks(ranks: Launcher) -> None:
    one([ranks(world)(train_slots, 12, [{"stage": 3}], shuffle=True, steps=2) for world in (1, 3)])


def test_accelerate_has_slots_in_bf16_and_in_fp16(ranks: Launcher) -> None:
    for precision in ("bf16", "fp16"):
        zero = [{"stage": 2, "loss_scale": {"initial": 1024.0}}]
        one([ranks(world)(train_slots, 4, zero, shuffle=True, mixed_precision=precision) for world in (1, 2)])


def test_accelerate_resumes_slots_on_other_ranks_inside_an_epoch(ranks: Launcher, tmp_path: Path) -> None:
    """Saved by 2 ranks, gone on with by 1, by 4 and by 2 in the end; once by one run on 2 ranks."""
    zero = {"stage": 3}
    whole = ranks(2)(train_and_save, 4, zero, str(tmp_path / "whole"), [5], 0)[0]
    parts, done, last = [], 0, None
    for world, until in ((2, 1), (1, 2), (4, 4), (2, 5)):
        last = ranks(world)(train_and_save, 4, zero, str(tmp_path / "parts"), [until], done)[0]
        parts.append(last)
        done = until
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert [norm for part in parts for norm in part.norms] == whole.norms
    assert [rate for part in parts for rate in part.rates] == whole.rates
    assert last is not None and last.digest == whole.digest
