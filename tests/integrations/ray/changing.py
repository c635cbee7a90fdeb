"""Workers of Ray Train that wait until a node comes or goes, and the same steps without Ray."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.ray.cluster import SECONDS, wait_for
from tests.integrations.ray.training import QUIET, arguments_of, batches, ended, fit, plain_net, tell

STEPS = 6


def mark(folder: str | Path, name: str, rank: int) -> Path:
    """A file by which a worker says where it is."""
    return Path(folder, f"{name}.rank{rank}")


def wait_to_be_ended(config: dict[str, Any], name: str) -> None:
    """Wait in every worker, once Ray has registered what it has reported, for a change of the cluster to end it."""
    import ray.train

    ray.train.get_all_reported_checkpoints()
    mark(config["folder"], name, dist.get_rank()).touch()
    time.sleep(SECONDS)
    raise TimeoutError(f"a worker that waits at {name} was not ended in {SECONDS:g} s")


def wait_for_notice(config: dict[str, Any], name: str) -> None:
    """Wait in every worker until Ray has told it that a node will be taken away."""
    from zero_strategy.integrations.ray.notices import own_notice

    mark(config["folder"], name, dist.get_rank()).touch()
    wait_for(own_notice)


# ---- elastic sizes ----


def exact_loop(path: str | None = None, after: Callable[[int, Any, list[str]], None] | None = None) -> Any:
    """Steps of a loop over an engine in float64, from a checkpoint on; losses of this rank and a digest of the weights.

    A step's batch is the same at any number of ranks.
    """
    from zero_strategy import ZeroEngine

    model = plain_net().double().eval()  # without dropout, whose numbers are each rank's own
    engine, optimizer = ZeroEngine(model, {"stage": 3}), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[str] = []
    with ended(engine):
        engine.attach(optimizer)
        if path is not None:
            engine.load(path)
        steps = range(engine.steps.taken, STEPS)
        for x, y in batches(dist.get_rank(), dist.get_world_size(), steps):
            loss = nn.functional.cross_entropy(model(x.double()), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            if after is not None:
                after(engine.steps.taken, engine, losses)
        weights = engine.full_state_dict()
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values()))
    return losses, digest.hexdigest()


def elastic_worker(config: dict[str, Any]) -> None:
    """Report after every second step; two workers wait after the third to lose one, one after the fifth for another."""
    from zero_strategy.integrations.ray import report, reported_checkpoint

    path, ranks, first = reported_checkpoint(), dist.get_world_size(), None

    def after(step: int, engine: Any, losses: list[str]) -> None:
        nonlocal first
        first = step - 1 if first is None else first
        tell(config, f"from{first}", {"losses": losses, "ranks": ranks, "path": path})
        if step % 2 == 0:
            report({"step": step}, engine.save)
        if (step, ranks) in ((3, 2), (5, 1)):
            wait_to_be_ended(config, f"step{step}")

    _, weights = exact_loop(path, after)
    tell(config, "end", {"weights": weights})


# ---- notices of preemption ----


def noticed_worker(config: dict[str, Any]) -> None:
    """Train by Lightning; the first attempt gets a notice in its fourth step, and is ended in its ninth."""
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    from zero_strategy.integrations.ray import RayReportCallback, RayZeroStrategy, reported_checkpoint

    path = reported_checkpoint()

    def before(step: int) -> None:
        if path is None and step == 3:
            wait_for_notice(config, "step3")
        if path is None and step == 8:
            wait_to_be_ended(config, "step8")

    trainer = pl.Trainer(
        max_epochs=2,
        devices="auto",
        accelerator="cpu",
        strategy=RayZeroStrategy(stage=3),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReportCallback(every_n_epochs=2)],
        use_distributed_sampler=False,
        **QUIET,
    )
    losses = fit(prepare_trainer(trainer), path, placed=True, before=before)
    tell(config, "noticed", {"losses": losses, "path": path})


def noticed_loops_worker(config: dict[str, Any]) -> None:
    """Loops that begin after a notice: each reports after its first step, and goes on to its end."""
    from tests.integrations.huggingface.training import build
    from tests.integrations.huggingface.training import rows as texts
    from zero_strategy import ZeroAccelerator, ZeroEngine, ZeroTrainer, engine_of
    from zero_strategy.integrations.ray import RaySaveCallback, report, save_on_notice

    wait_for_notice(config, "before")
    for name in ("engine", "accelerate"):
        model, accelerator = plain_net(), ZeroAccelerator(zero_config={"stage": 3}, cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if name == "engine":
            runner: Any = ZeroEngine(model, {"stage": 2})
            runner.attach(optimizer)
            engine, save = runner, runner.save
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
            runner, engine, save = accelerator, engine_of(accelerator), accelerator.save_state
        with ended(runner), save_on_notice(engine, lambda: report({name: engine.steps.taken}, save)) as boundary:  # noqa: B023
            for x, y in batches(dist.get_rank(), dist.get_world_size(), range(4)):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                boundary()
    arguments = arguments_of(config["folder"] + "/transformers", max_steps=4, save_strategy="no")
    trainer = ZeroTrainer(
        build("gpt2"), arguments, train_dataset=texts(), zero_config={"stage": 3}, callbacks=[RaySaveCallback()]
    )
    trainer.train()
