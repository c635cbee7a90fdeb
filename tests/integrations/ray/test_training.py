"""Ray Train with two CPU workers: the bits of our own launchers, reports, resumes, and a worker that is killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray.training import lightning_worker, loops_without_ray, loops_worker, told, without_ray
from tests.launcher import Launcher

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'"),
    pytest.mark.timeout(600),
]

Run = Callable[..., Any]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of this machine, on its loopback device."""
    import ray

    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": environment},
        log_to_driver=False,
    )
    yield context
    ray.shutdown()


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
