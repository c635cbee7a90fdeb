"""`save_state` and `load_state`: one checkpoint with all that was prepared and registered."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn

from tests.integrations.accelerate.training import Job, Net, Run, difference, fresh_state, make, train
from tests.launcher import Launcher
from zero_strategy.checkpoint.save_job import SaveJob
from zero_strategy.cli import main


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def interrupted(folder: str, stages: tuple[int, int], background: bool) -> Run:
    """Two epochs, the second by a new accelerator from the state of the first."""
    run, counter = Run(), Counter()
    zero = {"checkpoint": {"asynchronous": background}}
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        job = Job.of(make(stages[0], zero))
        job.accelerator.register_for_checkpointing(counter)
        job.epoch(run)
        counter.seen = 7
        job.accelerator.step = 5  # as in the middle of an epoch
        job.accelerator.save_state(folder)
        if background:
            job.epoch(Run())  # changes all that the snapshot must not see
        job.accelerator.wait_for_saves()
        counter.seen = 0
    with fresh_state():
        torch.manual_seed(999)
        job = Job.of(make(stages[1], zero))
        job.accelerator.register_for_checkpointing(counter)
        job.accelerator.load_state(folder)
        assert counter.seen == 7 and job.accelerator.step == 5
        list(job.loader)  # whose order is the script's own affair: one epoch has gone by
        job.epoch(run)
        return job.finish(run)


@functools.cache
def undisturbed(ranks: Launcher, stage: int) -> Run:
    return ranks(2)(train, stage)[0]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_training_is_the_same(ranks: Launcher, tmp_path: Path, stage: int, background: bool) -> None:
    whole = undisturbed(ranks, stage)
    resumed = ranks(2)(interrupted, str(tmp_path / "c"), (stage, stage), background)[0]
    assert resumed.rates == whole.rates
    assert difference(whole, resumed) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 0


def test_another_stage_and_world_size(ranks: Launcher, tmp_path: Path) -> None:
    whole = undisturbed(ranks, 1)
    assert difference(whole, ranks(2)(interrupted, str(tmp_path / "c"), (1, 3), False)[0]) < 2e-6
    weights = load_file(tmp_path / "c" / "model.safetensors")
    found = ranks(3)(only_loaded, str(tmp_path / "c"))
    for number, (state, kept) in enumerate(found):
        assert all(torch.equal(state[name], weights[name]) for name in weights)
        assert bool(kept) == (number == 0), "what is saved is rank 0's alone"


def only_loaded(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with fresh_state():
        job = Job.of(make(2))
        job.accelerator.register_for_checkpointing(Counter())
        job.accelerator.load_state(folder)
        accelerator: Any = job.accelerator
        return dict(accelerator.get_state_dict(job.model)), accelerator.main_state_dict(job.model)


def plain_then_ours(folder: str) -> tuple[Run, Run]:
    """Saved by Accelerate's own class after an epoch; gone on with there, and by ours."""
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        job, plain = Job.of(make(None)), Run()
        job.epoch(Run())
        job.accelerator.save_state(folder)
        job.epoch(plain)
        job.finish(plain)
    with fresh_state():
        job, ours = Job.of(make(3)), Run()
        list(job.loader)
        job.accelerator.load_state(folder)
        job.epoch(ours)
        return plain, job.finish(ours)


def test_a_state_of_plain_accelerate_is_gone_on_from(ranks: Launcher, tmp_path: Path) -> None:
    plain, ours = ranks(2)(plain_then_ours, str(tmp_path / "c"))[0]
    assert difference(plain, ours) < 2e-6


def named(folder: str) -> list[list[str]]:
    with fresh_state():
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        job, run = Job.of(make(3, project_config=project)), Run()
        listings = []
        for _ in range(3):
            job.epoch(run)
            job.accelerator.save_state()
            job.accelerator.wait_for_saves()
            job.accelerator.wait_for_everyone()
            listings.append(sorted(path.name for path in (Path(folder) / "checkpoints").iterdir()))
            job.accelerator.wait_for_everyone()
        before = job.finish(Run()).state
        job.epoch(Run())
        job.accelerator.load_state()
        after = job.finish(Run()).state
        assert all(torch.equal(before[name], after[name]) for name in before)
        return listings


def test_automatic_names_and_their_limit(ranks: Launcher, tmp_path: Path) -> None:
    for listings in ranks(2)(named, str(tmp_path)):
        assert listings == [
            ["checkpoint_0"],
            ["checkpoint_0", "checkpoint_1"],
            ["checkpoint_1", "checkpoint_2"],
        ]


def half_saved(folder: str) -> list[list[str]]:
    """Checkpoints while one of two models is still written, when that has failed, and after a save that went well."""
    gate, run = threading.Event(), SaveJob._run

    def late(job: SaveJob, *arguments: Any) -> None:
        if "model_0" in str(job.writer.target):
            gate.wait(60)
            raise OSError("disk full")
        run(job, *arguments)

    def names() -> list[str]:
        return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())

    with fresh_state(), pytest.MonkeyPatch.context() as patch:
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
        accelerator: Any = make(2, {"checkpoint": {"asynchronous": True}}, project_config=project)
        one, two = accelerator.prepare(Net(), nn.Linear(3, 2))
        accelerator.save_state()
        accelerator.wait_for_saves()
        patch.setattr(SaveJob, "_run", late)
        accelerator.save_state()
        accelerator.engine(two).saver.finish()
        found = [names()]
        gate.set()
        with pytest.raises(OSError, match="disk full"):
            accelerator.engine(one).saver.finish()
        found.append(names())
        patch.undo()
        accelerator.save_state()
        accelerator.wait_for_saves()
        return [*found, names()]


def test_an_old_state_stays_until_every_model_of_a_new_one_is_written(ranks: Launcher, tmp_path: Path) -> None:
    during, failed, written = ranks(1)(half_saved, str(tmp_path))[0]
    assert during == failed == ["checkpoint_0", "checkpoint_1"] and written == ["checkpoint_2"]


def mixed(folder: str) -> tuple[str, bool]:
    """The refusal of a directory with models of two saves, and whether models are as they were before it."""
    with fresh_state():
        accelerator: Any = make(2, {"checkpoint": {"asynchronous": False}})
        models = accelerator.prepare(Net(), nn.Linear(3, 2))
        accelerator.save_state(folder)
        (Path(folder) / "model_1").rename(Path(folder).parent / "old")
        accelerator.save_state(folder)
        shutil.rmtree(Path(folder) / "model_1")
        (Path(folder).parent / "old").rename(Path(folder) / "model_1")
        with torch.no_grad():
            for parameter in (parameter for model in models for parameter in model.parameters()):
                parameter.add_(1)
        before = [accelerator.get_state_dict(model) for model in models]
        with pytest.raises(ValueError) as raised:
            accelerator.load_state(folder)
        after = [accelerator.get_state_dict(model) for model in models]
        same = all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)
        return str(raised.value), same


def test_a_state_that_is_refused_changes_no_model(ranks: Launcher, tmp_path: Path) -> None:
    text, same = ranks(1)(mixed, str(tmp_path / "c"))[0]
    assert "several saves" in text and same


def hooked(folder: str) -> list[str]:
    calls = []

    def save_hook(models: list[nn.Module], weights: list[Any], directory: str) -> None:
        calls.append(f"save {len(models)} {weights}")
        if dist.get_rank() == 0:
            (Path(directory) / "of the hook.json").write_text(json.dumps({"a": 1}))

    def load_hook(models: list[nn.Module], directory: str) -> None:
        calls.append(f"load {len(models)} {json.loads((Path(directory) / 'of the hook.json').read_text())['a']}")

    with fresh_state():
        job = Job.of(make(2))
        job.accelerator.register_save_state_pre_hook(save_hook)
        job.accelerator.register_load_state_pre_hook(load_hook)
        job.accelerator.save_state(folder)
        job.accelerator.wait_for_everyone()
        job.accelerator.load_state(folder)
        return calls


def test_hooks_are_called(ranks: Launcher, tmp_path: Path) -> None:
    for calls in ranks(2)(hooked, str(tmp_path / "c")):
        assert calls == ["save 1 []", "load 1 1"]


def two_models(folder: str) -> bool:
    with fresh_state():
        accelerator = make(3)
        models = [Net(), nn.Linear(3, 2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        one, two, *_ = accelerator.prepare(*models, *optimizers)
        before = [accelerator.get_state_dict(model) for model in (one, two)]
        accelerator.save_state(folder)
        for model, optimizer, rows in ((one, optimizers[0], 6), (two, optimizers[1], 3)):
            accelerator.backward(model(torch.ones(2, rows)).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.load_state(folder)
        after = [accelerator.get_state_dict(model) for model in (one, two)]
        return all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)


def test_two_models(ranks: Launcher, tmp_path: Path) -> None:
    assert all(ranks(2)(two_models, str(tmp_path / "c")))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["model_0", "model_1"]


def refused(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    with fresh_state():
        accelerator = make(3, {"checkpoint": {"asynchronous": False}})
        note("nothing prepared", lambda: accelerator.save_state(f"{folder}/none"))
        models = [Net(), nn.Linear(3, 2)]
        one, _ = accelerator.prepare(*models)
        accelerator.save_state(f"{folder}/c")
        accelerator.wait_for_everyone()
        if dist.get_rank() == 0:
            (Path(folder) / "c" / "model_1").rename(Path(folder) / "old")
        accelerator.wait_for_everyone()
        accelerator.save_state(f"{folder}/c")
        accelerator.wait_for_everyone()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder) / "c" / "model_1")
            (Path(folder) / "old").rename(Path(folder) / "c" / "model_1")
        accelerator.wait_for_everyone()
        note("two saves", lambda: accelerator.load_state(f"{folder}/c"))
        note("outside", lambda: accelerator.backward(0.1 * sum(p.abs().sum() for p in one.parameters())))
    with fresh_state():
        job = Job.of(make(1, {"checkpoint": {"asynchronous": False}}))
        job.accelerator.save_state(f"{folder}/d")
        job.accelerator.save_state(f"{folder}/d")
        if dist.get_rank() == 0:
            (Path(folder) / "d" / "mine.txt").write_text("notes")
        job.accelerator.wait_for_everyone()
        note("notes", lambda: job.accelerator.save_state(f"{folder}/d"))
    return found


def test_nothing_is_lost_or_mixed_silently(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(refused, str(tmp_path)):
        assert "none is" in found["nothing prepared"]
        assert "several saves" in found["two saves"]
        assert "'first.weight' is released" in found["outside"]
        assert "mine.txt" in found["notes"]
    assert (tmp_path / "d" / "mine.txt").read_text() == "notes"


def exported(folder: str) -> None:
    with fresh_state():
        job = Job.of(make(3))
        job.accelerator.save_model(job.model, folder)
        job.accelerator.wait_for_everyone()


def test_save_model_writes_whole_weights(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(exported, str(tmp_path))
    stored, expected = load_file(tmp_path / "model.safetensors"), Net().state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
