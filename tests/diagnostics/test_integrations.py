"""Recorded figures reach the framework's loggers under stable names; pipelines are recorded with their timeline."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.integrations.accelerate.training import Job, Run, fresh_state, make
from tests.integrations.huggingface.training import trainer_of
from tests.integrations.lightning.trainers import Module, join, loader, trainer, zero
from tests.launcher import Launcher
from tests.verify.subjects import tiny
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.diagnostics.run_files import read_run
from zero_strategy.integrations.fabric import ZeroStrategy
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.verify.compare import VerifyReport

ALWAYS = {"zero/step_time/total", "zero/step_time/compute", "zero/samples_per_second", "zero/tflops_per_device"}


class Kept(GeneralTracker):
    """A tracker that keeps what it is told."""

    name, requires_logging_directory, main_process_only = "kept", False, False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.seen

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.seen.append((step, values))


def by_the_trainer(directory: Path) -> list[float]:
    module = Module()
    logger = CSVLogger(directory, name="", version="")
    strategy = zero(2, diagnostics={"run_dir": str(directory / "lightning")})
    fit = trainer(strategy, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    fit.fit(module, loader())
    return [sum(module.losses[at : at + 2]) / 2 for at in range(0, len(module.losses), 2)]


def by_fabric(directory: Path) -> list[set[str]]:
    join()
    strategy = ZeroStrategy(stage=1, diagnostics={"run_dir": str(directory / "fabric")})
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(plain := nn.Linear(4, 1), torch.optim.SGD(plain.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        found.append(set(strategy.step_metrics()))
    return [*found, set(strategy.step_metrics())]


def by_accelerate(directory: Path) -> list[tuple[int | None, dict[str, Any]]]:
    with fresh_state():
        kept = Kept()
        zero_config = {"diagnostics": {"run_dir": str(directory / "accelerate")}}
        accelerator = make(3, zero_config, log_with=kept, gradient_accumulation_steps=2)
        accelerator.init_trackers("test")
        Job.of(accelerator).epoch(Run())
        return kept.seen


def verified_by_accelerate(directory: Path) -> VerifyReport:
    """On the processes there are, with the accelerator's accumulation and precision."""
    with fresh_state():
        accelerator = make(3, gradient_accumulation_steps=2, mixed_precision="bf16")
        report: VerifyReport = accelerator.verify(tiny, steps=1)  # type: ignore[attr-defined]
        return report


def by_transformers(directory: Path) -> list[dict[str, Any]]:
    with fresh_state():
        diagnostics = {"run_dir": str(directory / "transformers")}
        ours = trainer_of(3, "gpt2", directory, zero={"diagnostics": diagnostics}, max_steps=2)
        ours.train()
        return [one for one in ours.state.log_history if "loss" in one]


def by_a_pipeline(directory: Path) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run_dir = str(directory / "pipeline")
    engine = PipelineEngine(module, {"stage": 1, "pipeline": {"micro_batches": 4}, "diagnostics": {"run_dir": run_dir}})
    install_diagnostics(engine)
    engine.attach(optimizer)
    losses = []
    for _ in range(3):
        losses.append(float(engine.forward_backward([(torch.ones(3, 8), torch.zeros(3, 8))] * 4)))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.evaluate([(torch.ones(3, 8), torch.zeros(3, 8))] * 4)
    return losses


def by_all(directory: Path) -> tuple[Any, ...]:
    integrations = (by_the_trainer, by_fabric, by_accelerate, by_transformers, by_a_pipeline, verified_by_accelerate)
    return tuple(integration(directory) for integration in integrations)


def test_every_face_tells_its_loggers(ranks: Launcher, tmp_path: Path) -> None:
    first, second = ranks(2)(by_all, tmp_path)
    check_lightning(tmp_path, [first[0], second[0]])
    for sets in (first[1], second[1]):
        assert sets[0] >= ALWAYS and "zero/bytes/all_gather" in sets[1] and not sets[2]
    assert [step for step, _ in first[2]] == [1, 2, 3] and not second[2]  # Accelerate's trackers are rank 0's
    assert all(values.keys() >= ALWAYS for _, values in first[2])
    for logged in (first[3], second[3]):
        assert len(logged) == 2 and all(ALWAYS | {"zero/tokens_per_second"} <= one.keys() for one in logged)
    check_pipeline(tmp_path, first[4])
    assert first[5] == second[5] and first[5].passed and first[5].ranks == 2, first[5]
    assert next(phase.compared for phase in first[5].phases if phase.phase == "loss") == 2
    steps = read_run(tmp_path / "transformers").steps[0]
    assert steps[0].tokens == 2 * 2 * 10 and steps[0].loss == pytest.approx(first[3][0]["loss"], rel=0.2)


def check_lightning(directory: Path, losses: list[list[float]]) -> None:
    with (directory / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("zero/step_time/total")]
    assert [int(row["step"]) for row in rows] == [0, 1]
    assert all(row[name] for row in rows for name in ALWAYS | {"zero/step_time/reduce_scatter"})
    run = read_run(directory / "lightning")
    for rank in (0, 1):
        assert [one.loss for one in run.steps[rank]] == pytest.approx(losses[rank], rel=1e-5)
        assert [one.samples for one in run.steps[rank]] == [8, 8]
        assert all(one.parts["data_wait"] > 0 for one in run.steps[rank])


def check_pipeline(directory: Path, losses: list[float]) -> None:
    run = read_run(directory / "pipeline")
    for rank in (0, 1):
        assert [one.step for one in run.steps[rank]] == [1, 2, 3]
        for found in run.steps[rank]:
            assert found.parts["pipeline_bubble"] > 0 and found.parts["compute"] > 0
            assert sum(found.parts.values()) == pytest.approx(found.seconds)
            # Two layers a stage: forward, gradient of the weight, and of the input but where that is the model's own.
            assert found.operations == 4 * (2 * 3 * 8 * 8) * (6 if rank else 5)
            assert found.flows["point_to_point"].nbytes > 4 * 3 * 8 * 4
        assert [one.loss for one in run.steps[rank]] == pytest.approx(losses)
        events = [one for one in run.traces[rank][2] if one.row == "pipeline" and one.name[0] in "FB"]
        assert sorted(one.name for one in events) == ["B0", "B1", "B2", "B3", "F0", "F1", "F2", "F3"]
        phases = [one for one in run.traces[rank][2] if one.row == "phase"]
        assert phases[0].begin <= min(one.begin for one in events) <= max(one.end for one in events) <= phases[-1].end
    assert run.steps[0][0].samples == 12 and run.facts["ranks"]["pipeline stages"] == 2
