"""Faults around state in files while training: a clear error, or the same bits as ever, and nothing left."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launcher import Launcher, RankError
from tests.offload.test_state_in_files import FullDrive, last_write_failed, make, outcome, tiers, train, unequal
from zero_strategy.offload.file_queues import BACKENDS, IO_VARIABLE

QUICK = {"probe_seconds": 0, "staging_bytes": 1 << 16}


def every_queue(folder: Path) -> list[str]:
    wrong = []
    expected: dict[str, Any] = {}
    for backend in (None, *BACKENDS):
        if backend is not None:
            os.environ[IO_VARIABLE] = backend
        try:
            engine, optimizer = make(3, "adamw", torch.bfloat16, {} if backend is None else tiers(folder)["all"])
            losses = train(engine, optimizer, range(4))
            found = outcome(engine, optimizer) | {"losses": losses}
            engine.detach()
        finally:
            os.environ.pop(IO_VARIABLE, None)
        expected = expected or found
        wrong += [f"{backend}: {each}" for each in unequal(found, expected)]
    return wrong + os.listdir(folder)


def test_where_io_uring_is_refused_training_is_the_same(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(2)(every_queue, tmp_path):
        assert wrong == []


def beside_another(folder: Path) -> list[str]:
    """Two engines of one process, and those of the other rank, at work in one directory in turns."""
    runs = [make(2, "adamw", torch.bfloat16, offload) for offload in ({}, *[tiers(folder)["nvme"]] * 2)]
    losses: list[list[float]] = [[] for _ in runs]
    for step in range(5):
        for found, (engine, optimizer) in zip(losses, runs, strict=True):
            found += train(engine, optimizer, range(step, step + 1))
    results = [outcome(*run) | {"losses": found} for run, found in zip(runs, losses, strict=True)]
    for engine, _ in runs:
        engine.detach()
    return unequal(results[1], results[0]) + unequal(results[2], results[0]) + os.listdir(folder)


def test_runs_that_share_a_directory(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(2)(beside_another, tmp_path):
        assert wrong == []


def failed_ahead(folder: Path) -> tuple[str, list[str]]:
    """A write behind a step fails, and is met by the next backward; no step follows, but a load of a checkpoint."""
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)["none"])
    train(engine, optimizer, range(3))
    engine.save(folder / "saved")
    train(engine, optimizer, range(3, 6))
    expected = outcome(engine, optimizer)
    with last_write_failed(folder) as (engine, optimizer):
        engine.module(torch.ones(4, 37, dtype=torch.bfloat16), True).sum().backward()
        store = engine.offloaded.optimizer
        met = "" if store is None else str([slots.failure for slots in store.passes])
        engine.reset()
        optimizer.zero_grad()
        engine.load(folder / "saved")
        train(engine, optimizer, range(3, 6))
        return met, unequal(outcome(engine, optimizer), expected)


def test_a_failure_is_forgotten_with_what_failed(ranks: Launcher, tmp_path: Path) -> None:
    ((met, wrong),) = ranks(1)(failed_ahead, tmp_path)
    assert "Input/output error" in met and wrong == []


def no_room(folder: Path, on_rank: int, stage: int) -> str:
    """One rank may not write large files: like a disk that is full for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN) if on_main_thread() else None
    try:
        if dist.get_rank() == on_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        make(stage, "adamw", torch.bfloat16, QUICK | {"optimizer": "nvme", "nvme_path": [str(folder)]})
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if before is not None:
            signal.signal(signal.SIGXFSZ, before)
    return "no error"


def on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_room_is_an_error_before_training_on_all_ranks(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    said = ranks(2)(no_room, tmp_path, 1, stage)
    assert str(tmp_path) in said[1] and "bytes" in said[1] and said[1].startswith("OSError"), said
    assert said[0].startswith("RuntimeError: failed on other rank(s): {1: ") and "122,880 bytes" in said[0], said
    assert os.listdir(tmp_path) == []


def no_directory(path: Path) -> str:
    try:
        make(2, "adamw", torch.bfloat16, QUICK | {"optimizer": "nvme", "nvme_path": [str(path)]})
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_path_that_is_no_directory(ranks: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (said,) = ranks(1)(no_directory, tmp_path / "file")
    assert str(tmp_path / "file") in said and (tmp_path / "file").read_text() == "mine"


def train_on_failing_drives(folder: Path, left: tuple[int, int], steps: int = 8) -> None:
    """Each rank's drive refuses writes of optimizer state after as many as `left` has for it."""
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)["gradients in memory"])
    store = engine.offloaded.optimizer
    assert store is not None
    train(engine, optimizer, range(2))
    store.tier.__class__ = FullDrive
    vars(store.tier)["left"] = left[dist.get_rank()]
    train(engine, optimizer, range(2, steps))


@pytest.mark.parametrize("left", [(7, 7), (7, 12), (1 << 30, 7)], ids=["both at once", "one later", "one alone"])
def test_every_rank_says_what_the_drive_said(ranks: Launcher, tmp_path: Path, left: tuple[int, int]) -> None:
    with pytest.raises(RankError) as info:
        ranks(2, grace=40.0)(train_on_failing_drives, tmp_path, left)
    assert set(info.value.failures) == {0, 1}
    for failure in info.value.failures.values():
        assert "injected" in failure.text.strip().splitlines()[-1], failure.text
