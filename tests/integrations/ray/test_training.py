"""Ray Train with two CPU workers: the bits of our own launchers, reports, resumes, and a worker that is killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray.cluster import one_node
from tests.integrations.ray.training import (
    lightning_worker,
    loops_without_ray,
    loops_worker,
    measured_worker,
    sweep_trial,
    told,
    without_ray,
)
from tests.launcher import Launcher

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'"),
    pytest.mark.timeout(900),
]

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with one_node(cpus=6) as context:
        yield context


@pytest.fixture
def train(cluster: Any, tmp_path: Path) -> Run:
    """Runs a function in workers, with the configuration in keywords; Ray's result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def run(function: Callable[[dict[str, Any]], None], workers: int = 2, failures: int = 0, **config: Any) -> Any:
        trainer = TorchTrainer(
            function,
            train_loop_config={"folder": str(tmp_path), **config},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                storage_path=str(tmp_path / "runs"), name="run", failure_config=FailureConfig(max_failures=failures)
            ),
        )
        return trainer.fit()

    return run


def test_stages_train_as_without_ray_and_resume_at_one_worker(ranks: Launcher, train: Run, tmp_path: Path) -> None:
    result = train(lightning_worker, stages=[2, 3], epochs=2)
    for stage in (2, 3):
        found = told(tmp_path, f"stage{stage}")
        assert [rank["losses"] for rank in found] == ranks(2)(without_ray, stage, 2)
        assert [rank["world"] for rank in found] == [2, 2] and len(found[0]["losses"]) == 12
    assert result.metrics["epoch"] == 1 and result.metrics["step"] == 12
    # Of four reports the last one is stage 3's, after both epochs.
    assert len(result.best_checkpoints) == 4
    path = f"{result.checkpoint.path}/checkpoint.ckpt"
    # Both have written, straight into the storage path.
    assert sorted(os.listdir(f"{path}/random")) == ["rank-00000.json", "rank-00001.json"]
    train(lightning_worker, workers=1, stages=[3], epochs=3)
    (alone,) = told(tmp_path, "stage3", workers=1)
    # The storage path has the run's last report, from which Ray goes on.
    assert alone["path"] == path and alone["world"] == 1 and len(alone["losses"]) == 12
    assert [alone["losses"]] == ranks(1)(without_ray, 3, 3, path)


def test_rays_own_example_with_the_line_of_the_strategy_changed(ranks: Launcher, train: Run, tmp_path: Path) -> None:
    result = train(lightning_worker, stages=[2, 3], epochs=1, rays_callback=True)
    whole = ranks(2)(without_ray, 3, 2)
    for stage in (2, 3):
        assert [rank["losses"] for rank in told(tmp_path, f"stage{stage}")] == [losses[:6] for losses in whole]
    # On one host its callback has copied a whole checkpoint, too.
    again = ranks(2)(without_ray, 3, 2, f"{result.checkpoint.path}/checkpoint.ckpt")
    assert again == [losses[6:] for losses in whole]


def test_a_killed_worker_resumes_with_the_same_bits(ranks: Launcher, cluster: Any, train: Run, tmp_path: Path) -> None:
    result = train(lightning_worker, failures=1, stages=[3], epochs=2, every=2, dies=str(tmp_path / "died"))
    assert (tmp_path / "died").exists() and result.error is None
    found = told(tmp_path, "stage3")
    # Six steps are an epoch; the kill is in the twelfth. Ray may not have registered the report of the tenth by then.
    first = 12 - len(found[0]["losses"])
    assert first in (8, 10)
    whole = ranks(2)(without_ray, 3, 2, placed=True)
    assert [rank["losses"] for rank in found] == [losses[first:] for losses in whole]
    assert all(rank["path"] is not None for rank in found)
    # The other worker names it, in its own log and in Ray's account of the attempt.
    logs = Path(cluster.address_info["session_dir"], "logs")
    naming = {
        log.parent.name
        for log in logs.rglob("*.*")
        if log.is_file() and "rank 1 is gone" in log.read_text("utf8", "replace")
    }
    assert naming == {"logs", "train"}


def test_loops_of_ones_own_of_accelerate_and_of_transformers(ranks: Launcher, train: Run, tmp_path: Path) -> None:
    result = train(loops_worker)
    whole = ranks(2)(loops_without_ray, str(tmp_path / "whole"))
    for name in ("engine", "accelerate"):
        assert [rank["losses"] for rank in told(tmp_path, name)] == [found[name] for found in whole]
    for rank, found in zip(told(tmp_path, "transformers"), whole, strict=True):
        assert rank["first"] == rank["again"] == found["transformers"] and len(rank["again"]) == 6
    assert len(result.best_checkpoints) == 4


def test_trials_of_a_sweep_train_at_once_as_each_alone(ranks: Launcher, cluster: Any, tmp_path: Path) -> None:
    from ray import tune

    rates = [1e-2, 3e-3]
    config = {"folder": str(tmp_path), "stages": [3], "epochs": 1, "meets": len(rates), "lr": tune.grid_search(rates)}
    run = tune.RunConfig(storage_path=str(tmp_path / "sweep"), name="sweep")
    trials = tune.Tuner(sweep_trial, param_space=config, run_config=run).fit()
    assert not trials.errors
    for rate in rates:
        folder = tmp_path / f"lr{rate}"
        assert [rank["losses"] for rank in told(folder, "stage3")] == ranks(2)(without_ray, 3, 1, lr=rate)
        (trial,) = (trial for trial in trials if trial.config["lr"] == rate)
        # Each has its own report, in its own folder.
        assert trial.metrics["step"] == 6 and trial.metrics["checkpoint_path"].startswith(str(folder))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
def test_a_report_takes_no_more_memory_than_a_unit(train: Run, tmp_path: Path) -> None:
    width, units = 2816, 4
    train(measured_worker, width=width, units=units)
    unit = 4 * width**2
    for found in told(tmp_path, "measured"):
        # Buffers of two thirds of a unit here, whatever the sizes of the model and its units.
        assert found["growth"] <= unit, f"{found['growth'] / unit:.2f} units; all weights and moments are {3 * units}"
        # Half of the weights and of their two moments, and of the gradients at most.
        assert 3 * units * unit / 2 <= found["held"] <= 4.1 * units * unit / 2
