"""Signals to a run of the Trainer: all ranks save after the same batch, whichever got it; a resumed run is exact."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.integrations.lightning.stateful import Dropping, Stateful, differences, left, rank, rows
from tests.integrations.lightning.trainers import Module, loader, trainer, zero
from tests.integrations.test_ends import gone
from tests.launcher import Launcher
from tests.watchdog.test_dropping import eventually
from zero_strategy.config import load_config
from zero_strategy.integrations.lightning.slurm_requeue import SlurmRequeue


class Kicked(Dropping):
    """Some ranks get a signal at a place."""

    def __init__(self, number: int, culprits: list[int], place: str) -> None:
        super().__init__()
        self.number, self.culprits, self.place = number, culprits, place

    def kick(self, place: str) -> None:
        if self.place == place and rank() in self.culprits:
            os.kill(os.getpid(), self.number)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kick(f"batch {self.trainer.fit_loop.total_batch_idx}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking and self.trainer.global_step < 4:
            self.kick("validation")
        super().validation_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.kick("end")


def run(
    tmp: str, stage: int, module: Dropping, ckpt_path: str | None = None, plugins: Any = None, **settings: Any
) -> Any:
    torch.manual_seed((1000 if ckpt_path else 3) + rank())
    random.seed((1000 if ckpt_path else 3) + rank())
    flags = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 4, "default_root_dir": tmp}
    flags["plugins"] = plugins
    made = trainer(zero(stage, **settings), num_sanity_val_steps=1, **flags)
    made.fit(module, Stateful(rows(21), 3), loader(8, seed=5), ckpt_path=ckpt_path)
    return left(made, module)


def signalled(tmp: str, stage: int, number: int, culprits: list[int], place: str) -> dict[str, Any]:
    expected = run(tmp, stage, Dropping())
    before, module, ended = signal.getsignal(number), Kicked(int(number), culprits, place), ""
    found = None
    try:
        found = run(tmp, stage, module)
    except SIGTERMException as error:
        ended = f"{error.code}"
    resumed = run(tmp, stage, Dropping(), f"{tmp}/preempted.ckpt")
    return {
        "ended": ended,
        "batches": len(module.seen),
        "went on": [] if found is None else differences(found, expected),
        "resumed": differences(resumed, expected) if resumed["losses"] else [],
        "left": len(resumed["losses"]),
        "restored": signal.getsignal(number) == before,
    }


@pytest.mark.parametrize(
    ("stage", "number", "culprits", "place", "saved"),
    [
        (3, signal.SIGTERM, [0], "batch 4", 6),
        (1, signal.SIGTERM, [0, 1], "batch 6", 7),
        (3, signal.SIGTERM, [1], "validation", 6),
        (1, signal.SIGTERM, [1], "end", 14),
        (2, signal.SIGUSR1, [1], "batch 4", 6),
    ],
)
def test_all_ranks_save_after_the_same_batch(
    ranks: Launcher, tmp_path: Path, stage: int, number: int, culprits: list[int], place: str, saved: int
) -> None:
    ends = number == signal.SIGTERM
    for found in ranks(2)(signalled, str(tmp_path), stage, number, culprits, place):
        assert found == {
            "ended": "143" if ends else "",
            "batches": saved if ends else 14,
            "went on": [],
            "resumed": [],
            "left": 14 - saved,
            "restored": True,
        }


class Kick(Callback):
    """Rank 1 gets the signal in the third batch; those of a search, which sets callbacks aside, are not counted."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def searched(tmp: str) -> dict[str, Any]:
    def fit() -> tuple[ref[Any], int, str]:
        finder = LearningRateFinder(num_training_steps=5, min_lr=1e-4, max_lr=1e-1)
        run, ended = trainer(zero(3), callbacks=[finder, Kick()], default_root_dir=tmp), ""
        try:
            run.fit(Module(), loader())
        except SIGTERMException as error:
            ended = f"{error.code}"
        return ref(run.strategy.engine), run.global_step, ended

    before = signal.getsignal(signal.SIGTERM)
    engine, steps, ended = fit()
    restored = signal.getsignal(signal.SIGTERM) == before
    return {"ended": ended, "steps": steps, "restored": restored, "gone": eventually(lambda: gone(engine))}


def test_after_a_search_for_the_learning_rate(ranks: Launcher, tmp_path: Path) -> None:
    """Module that trains before Lightning sets its handlers."""
    for found in ranks(2)(searched, str(tmp_path)):
        assert found == {"ended": "143", "steps": 3, "restored": True, "gone": True}
    assert (tmp_path / "preempted.ckpt" / "manifest.json").is_file()


def turned_off(tmp: str) -> list[Any]:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    run(tmp, 2, Kicked(int(signal.SIGUSR1), [0], "batch 4"), checkpoint={"preemption_signals": ["SIGTERM"]})
    first = os.path.exists(f"{tmp}/preempted.ckpt")
    run(tmp, 2, Kicked(int(signal.SIGUSR1), [0], "batch 4"))
    return [len(came), first, os.path.exists(f"{tmp}/preempted.ckpt")]


def test_signals_that_are_not_listed_and_handlers_of_the_user(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(turned_off, str(tmp_path)) == [[2, False, True]]


SCONTROL = """#!/bin/sh
echo "$@" >> {calls}
"""


@contextlib.contextmanager
def in_slurm(folder: Path) -> Iterator[None]:
    """Variables of a task of a job's array, and an `scontrol` that only notes what it was called with."""
    program = folder / f"scontrol-{rank()}" / "scontrol"
    program.parent.mkdir(exist_ok=True)
    program.write_text(SCONTROL.format(calls=folder / "calls"))
    program.chmod(0o755)
    size = str(dist.get_world_size())
    variables = {
        "SLURM_NTASKS": size, "SLURM_NTASKS_PER_NODE": size, "SLURM_PROCID": str(rank()), "SLURM_LOCALID": str(rank()),
        "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "79",
        "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2", "PATH": f"{program.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        yield


def requeued(tmp: str, number: int, culprits: list[int]) -> dict[str, Any]:
    expected = run(f"{tmp}/whole", 3, Dropping())
    environment = SLURMEnvironment(requeue_signal=signal.Signals(number))
    signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and Lightning leaves it so
    before = signal.getsignal(number)
    with in_slurm(Path(tmp)):
        first = run(tmp, 3, Kicked(number, culprits, "batch 4"), plugins=[environment])
        restored = signal.getsignal(number) == before
        if rank() == 0:  # of a save that was killed
            os.mkdir(f"{tmp}/.requeued.ckpt.1f2e3d4c.tmp")
        dist.barrier()
        # Without a path: Lightning finds the checkpoint by itself.
        again = run(tmp, 3, Dropping(), plugins=[environment])
    return {
        "went on": differences(first, expected),
        "resumed": differences(again, expected),
        "left": len(again["losses"]),
        "restored": restored,
    }


@pytest.mark.parametrize(
    ("number", "culprits"), [(signal.SIGUSR1, [1]), (signal.SIGUSR1, [0, 1]), (signal.SIGHUP, [0])]
)
def test_a_job_of_slurm_is_saved_at_the_end_of_a_batch_and_requeued_once(
    ranks: Launcher, tmp_path: Path, number: int, culprits: list[int]
) -> None:
    for found in ranks(2)(requeued, str(tmp_path), int(number), culprits):
        assert found == {"went on": [], "resumed": [], "left": 8, "restored": True}
    assert (tmp_path / "calls").read_text() == "requeue 77_2\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt" / "manifest.json").is_file()
    assert not (tmp_path / "requeued.ckpt").exists() and not (tmp_path / "preempted.ckpt").exists()


def test_who_requeues_a_job_of_slurm() -> None:
    def asked(environment: Any, originals: dict[int, Any], **checkpoint: Any) -> int | None:
        strategy = SimpleNamespace(config=load_config(checkpoint=checkpoint), cluster_environment=environment)
        found = SlurmRequeue.asked_by(strategy, originals)
        return None if found is None else found.number

    user = int(signal.SIGUSR1)
    assert asked(SLURMEnvironment(), {}) == asked(SLURMEnvironment(), {user: signal.SIG_DFL}) == user
    assert asked(SLURMEnvironment(requeue_signal=signal.SIGHUP), {user: print}) == int(signal.SIGHUP)
    assert asked(SLURMEnvironment(), {user: print}) is None, "nor does Lightning, over a handler of the user's"
    assert asked(SLURMEnvironment(auto_requeue=False), {}) is None
    assert asked(SLURMEnvironment(), {}, preemption_signals=[]) is None, "all are left to Lightning"
    assert asked(LightningEnvironment(), {}) is None


SCRIPT = textwrap.dedent(
    """
    import sys, time
    from tests.integrations.lightning.stateful import Dropping, Stateful, rows
    from tests.integrations.lightning.trainers import PLAIN, zero
    import lightning.pytorch as pl
    class Slow(Dropping):
        def on_train_batch_start(self, batch, batch_idx):
            print("batch", batch_idx, flush=True)
            time.sleep(0.02)
    trainer = pl.Trainer(strategy=zero(2), devices=1, use_distributed_sampler=False, max_epochs=1,
                         enable_checkpointing=False, default_root_dir=sys.argv[1], **PLAIN)
    trainer.fit(Slow(), Stateful(rows(3000), 1))
    """
)


def test_a_process_ends_with_a_checkpoint_and_says_how_to_resume(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() not in ("batch 3\n", ""):
        pass
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert (tmp_path / "preempted.ckpt" / "manifest.json").is_file()
