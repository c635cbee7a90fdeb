"""Remains of a integration that is done: everything that can still be used, and nothing when nobody holds it.

Each in processes of its own: threads of engines of other tests would count.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from tests.integrations.accelerate.training import Job, Run, fresh_state, make
from tests.integrations.lightning.trainers import Module, loader, trainer, weights, zero
from tests.launcher import Launcher
from tests.watchdog.test_dropping import eventually, groups


def gone(engine: ref[Any]) -> bool:
    """After a collection; a thread that looks at the engine at that moment holds it until it is done."""
    gc.collect()
    return engine() is None


def ended(threads: set[threading.Thread]) -> bool:
    """The same of threads of engines that nobody has a reference to here."""
    gc.collect()
    return set(threading.enumerate()) <= threads


def left(use: Callable[[], ref[Any]]) -> list[str]:
    """Objects that a use of a integration leaves, of which nothing is held any more."""
    known, before = groups(), set(threading.enumerate())
    engine = use()
    found = [] if eventually(lambda: gone(engine)) else ["the engine"]
    if not eventually(lambda: ended(before)):
        found.append(f"threads {set(threading.enumerate()) - before}")
    if groups() > known:
        found.append(f"{groups() - known} groups")
    return found


def fit(folder: str) -> ref[Any]:
    """And what comes after it."""
    module, strategy = Module(), zero(3)
    run = trainer(strategy)
    run.fit(module, loader())
    run.save_checkpoint(f"{folder}/one")
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    first = weights(module)
    run = trainer(zero(3), max_epochs=2)
    run.fit(module, loader(), ckpt_path=f"{folder}/one")
    assert any(not torch.equal(value, first[name]) for name, value in weights(module).items())
    return ref(strategy.engine)


def accelerate(end: str) -> ref[Any]:
    with fresh_state():
        job, run = Job.of(make(3)), Run()
        job.epoch(run)
        engine = job.accelerator.engine(job.model)
        if end == "free_memory":
            job.accelerator.free_memory(job.model)
            assert engine.mesh.closed and not job.accelerator.engines
        elif end == "end_training":
            dist.barrier()
            job.accelerator.end_training()
            assert engine.mesh.closed and not dist.is_initialized()
        return ref(engine)


def trainers(folder: str) -> dict[str, list[str]]:
    return {"fit": left(lambda: fit(folder))}


def scripts() -> dict[str, list[str]]:
    ends = ("", "free_memory", "end_training")  # the last ends the process group
    return {end: left(lambda: accelerate(end)) for end in ends}  # noqa: B023


def test_a_trainer(fresh_ranks: Launcher, tmp_path: Path) -> None:
    for found in fresh_ranks(2, timeout=120)(trainers, str(tmp_path)):
        assert not any(found.values()), found


def test_end_of_run_accelerate(fresh_ranks: Launcher) -> None:
    for found in fresh_ranks(2, timeout=120)(scripts):
        assert not any(found.values()), found
