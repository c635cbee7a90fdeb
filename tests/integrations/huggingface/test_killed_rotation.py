"""A kill after a save, before or while an older checkpoint is removed: what is left loads, and saving goes on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch import Tensor

from tests.integrations.accelerate.training import Job, Run, fresh_state, make
from tests.integrations.huggingface.training import difference, history, trainer_of
from tests.launcher import Launcher, RankError
from zero_strategy.cli.checkpoint_checks import verify


def die_when_removing(name: str, files: int) -> None:
    """Let this process kill itself when so many files of a directory of that name have been removed by `rmtree`."""
    inside = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal inside, files
        if event == "shutil.rmtree":
            inside = Path(arguments[0]).name == name
        if inside and event in ("shutil.rmtree", "os.remove"):
            if files == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            files -= 1

    sys.addaudithook(watch)  # which ends with the process


def die_when_writing(name: str) -> None:
    """Let this process kill itself before it writes a file of that path's end."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(name) and "w" in str(arguments[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def train_until_writing(folder: str, name: str) -> None:
    die_when_writing(name)
    train(folder, None)


def train(folder: str, kill: int | None, resumed: bool = False) -> list[dict[str, float]]:
    """Saves at steps 2, 4, 6 and 8 and keeps two; killed when the third is there."""
    if kill is not None:
        die_when_removing("checkpoint-2", kill)
    with fresh_state():
        options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
        trainer = trainer_of(3, "gpt2", Path(folder), **options)
        trainer.train(resume_from_checkpoint=resumed)
        return history(trainer)


def complete(checkpoint: Path) -> bool:
    """True if every byte that a save wrote is there; the Trainer puts files of its own beside them."""
    return all("the manifest does not list it" in problem for problem in verify(checkpoint).problems)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], list[str]]:
    """The log of a run that nobody kills, and the checkpoints that it leaves."""
    folder = tmp_path_factory.mktemp("whole")
    return ranks(2, timeout=120)(train, str(folder), None)[0], names(folder)


@pytest.mark.parametrize("files", [0, 3])
def test_the_trainer(
    ranks: Launcher, tmp_path: Path, files: int, undisturbed: tuple[list[dict[str, float]], list[str]]
) -> None:
    expected, kept = undisturbed
    folder = tmp_path / "cut"
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=120)(train, str(folder), files)
    assert caught.value.failures[0].kind == "died"
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert complete(folder / "checkpoint-2") == (files == 0)
    for left in ("checkpoint-4", "checkpoint-6"):
        assert complete(folder / left)
    resumed = ranks(2, timeout=120)(train, str(folder), None, True)[0]
    assert difference(expected, resumed) < 1e-5
    assert names(folder) == kept == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.filterwarnings("ignore:.*resuming from checkpoint-4")
def test_a_kill_between_the_weights_and_the_trainer_s_own_files(
    ranks: Launcher, tmp_path: Path, undisturbed: tuple[list[dict[str, float]], list[str]]
) -> None:
    expected, _ = undisturbed
    folder = tmp_path / "cut"
    with pytest.raises(RankError):
        ranks(2, timeout=120)(train_until_writing, str(folder), "checkpoint-6/trainer_state.json")
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    resumed = ranks(2, timeout=120)(train, str(folder), None, True)[0]
    assert difference(expected, resumed) < 1e-5
    assert names(folder) == ["checkpoint-6", "checkpoint-8"]


def loop(folder: str, kill: int | None, first: int, saves: int) -> dict[str, Tensor]:
    """A step and a save, several times, after what there is was loaded; two checkpoints are kept."""
    if kill is not None:
        die_when_removing("checkpoint_0", kill)
    with fresh_state():
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2, iteration=first)
        accelerator: Any = make(3, project_config=project)
        job, run = Job.of(accelerator), Run()
        if first:
            accelerator.load_state()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(saves):
            job.batch(run, x, x.cos())
            accelerator.save_state()
        accelerator.wait_for_saves()
        accelerator.wait_for_everyone()
        return job.finish(run).state


@pytest.mark.parametrize("files", [0, 3])
def test_killed_rotation_accelerate(ranks: Launcher, tmp_path: Path, files: int) -> None:
    expected = ranks(2, timeout=120)(loop, str(tmp_path / "whole"), None, 0, 5)[0]
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=120)(loop, str(tmp_path / "cut"), files, 0, 3)
    assert caught.value.failures[0].kind == "died"
    folder = tmp_path / "cut" / "checkpoints"
    assert names(folder) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert complete(folder / "checkpoint_0") == (files == 0)
    for left in ("checkpoint_1", "checkpoint_2"):
        assert complete(folder / left)
    resumed = ranks(2, timeout=120)(loop, str(tmp_path / "cut"), None, 3, 2)[0]
    assert all(torch.equal(expected[name], value) for name, value in resumed.items())
    assert names(folder) == names(tmp_path / "whole" / "checkpoints") == ["checkpoint_3", "checkpoint_4"]
