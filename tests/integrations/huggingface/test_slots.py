"""Slots under the transformers Trainer: the bits of a training on any number of processes, its resume on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.huggingface.slots import Trained, by_engine, plain_losses, rows, train_part, train_trainers
from tests.launcher import Launcher

STAGES: list[dict[str, Any]] = [{"zero": {"stage": 1}}, {"zero": {"stage": 3}}]


def one(found: list[list[list[Trained]]]) -> Trained:
    """The one result of all runs, ranks and cases."""
    every = [each for run in found for rank in run for each in rank]
    assert all(each == every[0] for each in every), [(e.digest[:8], e.counts, e.loss, e.log) for e in every]
    return every[0]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_trainer_has_the_same_bits_on_any_ranks(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    """Weights, states, logged losses and norms, numbers of steps and tokens; those of a loop over the engine."""
    common = {"kind": kind, "lr_scheduler_type": "constant"}
    found = one([ranks(world, timeout=300)(train_trainers, str(tmp_path), STAGES, **common) for world in (1, 2, 4)])
    assert found.counts[:2] == [8, 8 * 8 * 10]
    assert found.digest == ranks(1)(by_engine, kind)[0]


def test_trainer_has_the_mean_over_the_tokens_of_a_step(ranks: Launcher, tmp_path: Path) -> None:
    """Losses of transformers' own Trainer, whose steps have the same samples in other micro-batches."""
    plain = ranks(1)(plain_losses, str(tmp_path))[0]
    common = {"dropout": 0.0, "data": rows(32), "train_sampling_strategy": "sequential"}
    found = one([ranks(world)(train_trainers, str(tmp_path), STAGES[1:], **common) for world in (2,)])
    assert [entry["loss"] for entry in found.log if "loss" in entry] == pytest.approx(plain, rel=2e-5)


def test_trainer_has_slots_on_three_ranks(ranks: Launcher, tmp_path: Path) -> None:
    """Logged every other step."""
    common = {"slots": 12, "logging_steps": 2, "num_train_epochs": 3}
    one([ranks(world)(train_trainers, str(tmp_path), STAGES[1:], **common) for world in (1, 3)])


def test_trainer_resumes_slots_on_other_ranks_inside_an_epoch(ranks: Launcher, tmp_path: Path) -> None:
    """Saved by 2 ranks, gone on with by 1, by 4 and by 2 in the end; once by one run on 2 ranks."""
    zero = {"stage": 3}
    whole = ranks(2, timeout=300)(train_part, str(tmp_path / "whole"), zero, None, False)[0]
    folder, last, log = str(tmp_path / "parts"), None, []
    for world, until in ((2, 1), (1, 3), (4, 6), (2, None)):
        last = ranks(world, timeout=300)(train_part, folder, zero, until, last is not None)[0]
        log = [*(entry for entry in last.log if "loss" in entry)]
    assert last is not None and last.digest == whole.digest and last.counts == whole.counts
    assert log == [entry for entry in whole.log if "loss" in entry]
