"""Saves in the background of state in files: the bytes of a save at once, while training goes on."""

from __future__ import annotations

import errno
import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_background_saves import HeldBack, digests, rank
from tests.launcher import Launcher
from tests.offload.test_state_in_files import make, outcome, tiers, train, unequal
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.offload.tier import NvmeTier, NvmeTransfer

TIERS = {
    "nvme": 2,
    "nvme at stage 0": 0,
    "half resident": 3,
    "mixed too": 3,
    "gradients in files": 2,
}


def described(directory: Path) -> dict[str, Any]:
    """Entries of the manifest that do not name the save: sizes, checksums, tables."""
    found = json.loads((directory / "manifest.json").read_text())
    files = {path: each for path, each in found["files"].items() if not path.startswith("random/")}
    return {"files": files, "optimizers": found["optimizers"], "digests": digests(directory)}


def saved_while_training(folder: Path, tier: str, dtype: torch.dtype | None) -> dict[str, Any]:
    (folder / "state").mkdir(parents=True, exist_ok=True)
    settings = tiers(folder / "state")[tier.removesuffix(" at stage 0")]
    engine, optimizer = make(TIERS[tier], "adamw", dtype, settings)
    found: dict[str, Any] = {"while": []}
    train(engine, optimizer, range(3))
    for turn in range(2):  # the second finds room that the first has made
        engine.save(folder / f"now {turn}")
        with HeldBack() as held:
            pending = engine.save(folder / f"later {turn}", asynchronous=True)
            train(engine, optimizer, range(3 + 2 * turn, 5 + 2 * turn))
            found["while"].append((pending.done(), engine.saver.busy()))
            held.go.set()
            pending.wait()
    found["memory"] = engine.saver.snapshot_bytes
    found["state"] = outcome(engine, optimizer)
    engine.detach()
    engine.close()
    found["left"] = os.listdir(folder / "state")
    return found


@functools.cache
def undisturbed(stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """The run that several tiers are compared with."""
    engine, optimizer = make(stage, "adamw", dtype, {})
    train(engine, optimizer, range(7))
    return outcome(engine, optimizer)


def all_tiers(folder: Path, names: list[str], dtype: torch.dtype | None) -> list[str]:
    wrong = []
    for name in names:
        found = saved_while_training(folder / name, name, dtype)
        wrong += [f"{name}: {each}" for each in unequal(found["state"], undisturbed(TIERS[name], dtype))]
        if (found["while"], found["memory"]) != ([(False, True)] * 2, 0):
            wrong.append(f"{name}: {found['while']} {found['memory']}")
    return wrong


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (1, None)])
def test_file_snapshot_holds_the_state_of_the_call(
    ranks: Launcher, tmp_path: Path, world: int, dtype: torch.dtype | None
) -> None:
    names = list(TIERS) if world == 2 else ["half resident"]
    for wrong in ranks(world)(all_tiers, tmp_path, names, dtype):
        assert wrong == []
    for name in names:
        for turn in range(2):
            now, later = (tmp_path / name / f"{when} {turn}" for when in ("now", "later"))
            assert described(now) == described(later), (name, turn)
            assert verify(later).problems == ()
        assert digests(tmp_path / name / "later 0") != digests(tmp_path / name / "later 1")


class FullDrive(NvmeTier):
    """Has no more room."""

    def reserve(self, sizes: Mapping[str, int]) -> None:
        raise OSError(errno.ENOSPC, f"injected: {sum(sizes.values())} bytes are needed", "/somewhere")


def without_room(folder: Path) -> dict[str, Any]:
    """One rank's drive has no room for what changes meanwhile: the save is written at once on all."""
    (folder / "state").mkdir(exist_ok=True)
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder / "state")["nvme"])
    train(engine, optimizer, range(2))
    engine.save(folder / "now")
    tier = engine.offloaded.files
    assert tier is not None
    if rank() == 1:
        tier.__class__ = FullDrive
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending = engine.save(folder / "later", asynchronous=True)
    done, tier.__class__ = (folder / "later").exists(), NvmeTier
    pending.wait()
    return {"done": done, "said": [str(each.message) for each in caught if "nvme_path" in str(each.message)]}


def test_without_room_it_is_written_at_once(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(without_room, tmp_path):
        assert found["done"] and len(found["said"]) == 1 and "written at once" in found["said"][0], found
    assert described(tmp_path / "now") == described(tmp_path / "later")


class FailingDrive(NvmeTier):
    """Refuses all writes."""

    def write(self, record: str, memory: Tensor) -> NvmeTransfer:
        raise OSError(errno.EIO, "injected", record)


def failing_meanwhile(folder: Path) -> list[str]:
    """The step that follows fails: the checkpoint under way is whole all the same, and training goes on from it."""
    (folder / "state").mkdir(exist_ok=True)
    offload = tiers(folder / "state")["gradients in memory"]
    engine, optimizer = make(2, "adamw", torch.bfloat16, offload)
    train(engine, optimizer, range(2))
    engine.save(folder / "now")
    tier, said = engine.offloaded.files, ""
    assert tier is not None
    with HeldBack() as held:
        pending = engine.save(folder / "later", asynchronous=True)
        engine.offloaded.settle()
        whole, tier.__class__ = tier.__class__, FailingDrive
        try:
            train(engine, optimizer, range(2, 3))
        except OSError as error:
            said = str(error)
        tier.__class__ = whole
        engine.reset()
        optimizer.zero_grad()
        held.go.set()
        pending.wait()
    assert "injected" in said
    engine.load(folder / "later")
    train(engine, optimizer, range(2, 4))
    found = outcome(engine, optimizer)
    engine.detach()
    engine, optimizer = make(2, "adamw", torch.bfloat16, {})
    train(engine, optimizer, range(4))
    return unequal(found, outcome(engine, optimizer))


def test_a_step_that_fails_does_not_fail_the_save(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(failing_meanwhile, tmp_path) == [[]]
    assert described(tmp_path / "now") == described(tmp_path / "later")


def let_go_meanwhile(folder: Path) -> dict[str, Any]:
    """Optimizers that are let go wait for the save that reads their state."""
    (folder / "state").mkdir(exist_ok=True)
    engine, optimizer = make(3, "adamw", torch.bfloat16, tiers(folder / "state")["all"])
    train(engine, optimizer, range(2))
    engine.save(folder / "now")
    engine.save(folder / "later", asynchronous=True)
    engine.detach()
    engine.close()
    return {"left": os.listdir(folder / "state")}


def test_what_is_let_go_is_saved_first(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(let_go_meanwhile, tmp_path)
    assert described(tmp_path / "now") == described(tmp_path / "later")
    assert os.listdir(tmp_path / "state") == []
