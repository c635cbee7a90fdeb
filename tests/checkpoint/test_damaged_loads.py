"""200 damaged checkpoints: `verify` and a load by the engine find each of them, on all ranks, and name what is hit."""

from __future__ import annotations

import collections
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.faults import FAULTS, Fault, files_of
from tests.launcher import Launcher
from tests.models import build, loss_fn, make_batch
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

COUNT = 200
FILE_BYTES = 12_000
"""The weights take several files."""


def make(seed: int) -> tuple[torch.nn.Module, ZeroEngine, torch.optim.Optimizer]:
    model = build("transformer", seed)
    config = load_config(stage=3, units={"min_numel": 0}, checkpoint={"max_file_bytes": FILE_BYTES})
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine.attach(optimizer)
    return model, engine, optimizer


def save_two(folder: str) -> None:
    """Two checkpoints of one model, from consecutive steps."""
    model, engine, optimizer = make(3)
    for step in range(2):
        loss_fn(model, make_batch("transformer", step, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.save(f"{folder}/step-{step}", extra_files={"notes/a.txt": f"{step} steps".encode()})


def said_by_load(engine: ZeroEngine, directory: Path) -> str:
    """The error of a load; empty if there is none."""
    try:
        engine.load(directory)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def said_by_verify(directory: Path) -> str:
    try:
        return "\n".join(verify(directory).problems)
    except ValueError as error:
        return str(error)


def damage_and_load(folder: str, seed: int) -> list[tuple[Fault, str, str]]:
    """For each fault: what loading said on this rank, and what `verify` said."""
    _, engine, _ = make(5)
    draw = random.Random(seed)
    good, other, bad = Path(folder, "step-1"), Path(folder, "step-0"), Path(folder, "damaged")
    assert said_by_load(engine, good) == "" == said_by_verify(good)
    results = []
    for number in range(COUNT):
        fault: list[Any] = [None]
        if dist.get_rank() == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            fault = [FAULTS[number % len(FAULTS)](bad, other, draw)]
        dist.broadcast_object_list(fault)
        results.append((fault[0], said_by_load(engine, bad), said_by_verify(bad)))
        dist.barrier()
    assert said_by_load(engine, good) == "", "a failed load leaves an engine that can load"
    return results


def test_200_faults_are_all_found_and_named(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(save_two, str(tmp_path))
    assert len([name for name in files_of(tmp_path / "step-1") if name.startswith("model-")]) >= 3
    results = ranks(2, timeout=120)(damage_and_load, str(tmp_path), 1)
    for found in results:
        assert collections.Counter(fault.kind for fault, _, _ in found) == dict.fromkeys(
            ("flip", "truncate", "lose", "swap", "exchange"), COUNT // 5
        )
        for fault, loading, verifying in found:
            assert loading and fault.is_named_by(loading), (fault, loading)
            assert verifying and fault.is_named_by(verifying), (fault, verifying)


def go_on_half_loaded(folder: str, damaged: str) -> list[str]:
    """Messages of a step and a save after a damaged load, and of a step after a good one."""
    model, engine, optimizer = make(3)

    def step() -> str:
        try:
            loss_fn(model, make_batch("transformer", 7, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.save(f"{folder}/after")
        except RuntimeError as error:
            return str(error)
        return ""

    assert step() == ""
    good, bad = Path(folder, "good"), Path(folder, "bad")
    engine.save(good)
    if dist.get_rank() == 0:
        shutil.copytree(good, bad)
        path = max(bad.glob(damaged))
        content = bytearray(path.read_bytes())
        content[-5] ^= 64
        path.write_bytes(content)
    dist.barrier()
    assert str(bad) in said_by_load(engine, bad)
    found = [step()]
    try:
        engine.save(f"{folder}/half")
    except RuntimeError as error:
        found.append(str(error))
    assert said_by_load(engine, good) == ""
    return [*found, step()]


@pytest.mark.parametrize(
    "damaged, what",
    [("optimizer/exp_avg_sq.safetensors", "the state of AdamW"), ("model-*.safetensors", "the weights")],
)
def test_half_loaded_state_is_named_by_steps_and_saves_until_a_load_succeeds(
    ranks: Launcher, tmp_path: Path, damaged: str, what: str
) -> None:
    for stepping, saving, after in ranks(2)(go_on_half_loaded, str(tmp_path), damaged):
        assert f"an optimizer's step needs {what}" in stepping and str(tmp_path / "bad") in stepping
        assert f"saving a checkpoint needs {what}" in saving and after == ""
    assert not (tmp_path / "half").exists()


def restore_by_state_dicts(folder: str) -> list[str]:
    """Messages of a step after a damaged load, and after state dicts that were kept have been loaded."""
    model, engine, optimizer = make(3)
    loss_fn(model, make_batch("transformer", 7, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = engine.full_state_dict(), engine.optimizer_state_dict(optimizer)
    bad = Path(folder, "bad")
    engine.save(bad)
    if dist.get_rank() == 0:
        path = max(bad.glob("model-*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-5] ^= 64
        path.write_bytes(content)
    shared = [{name: value for name, value in weights.items()} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    assert str(bad) in said_by_load(engine, bad)

    def step() -> str:
        try:
            loss_fn(model, make_batch("transformer", 7, 4)).backward()
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    found = [step()]
    model.load_state_dict(shared[0])
    engine.load_optimizer_state_dict(optimizer, state)
    return [*found, step()]


def test_state_dicts_make_half_loaded_state_whole(ranks: Launcher, tmp_path: Path) -> None:
    for before, after in ranks(2)(restore_by_state_dicts, str(tmp_path)):
        assert "needs the weights" in before and after == ""
