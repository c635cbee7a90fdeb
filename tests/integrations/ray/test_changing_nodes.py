"""Ray Train on nodes that come and go: elastic numbers of workers, and notices that a node will be taken away."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray.changing import elastic_worker, exact_loop, mark, noticed_loops_worker, noticed_worker
from tests.integrations.ray.cluster import Nodes, during, several_nodes, wait_for
from tests.integrations.ray.training import told, without_ray
from tests.launcher import Launcher

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with several_nodes(2) as found:
        yield found


def train(
    function: Callable[[dict[str, Any]], None], workers: int | tuple[int, int], folder: Path, failures: int = 1
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        function,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(
            storage_path=str(folder / "runs"), name="run", failure_config=FailureConfig(max_failures=failures)
        ),
    )
    return trainer.fit()


def all_at(folder: Path, name: str, workers: int = 2) -> None:
    """Wait until all workers are there."""
    wait_for(lambda: all(mark(folder, name, rank).exists() for rank in range(workers)))


def test_an_elastic_run_goes_from_two_workers_to_one_and_back(ranks: Launcher, nodes: Nodes, tmp_path: Path) -> None:
    def events() -> None:
        all_at(tmp_path, "step3")
        nodes.lose()
        all_at(tmp_path, "step5", workers=1)
        nodes.add()

    result = during(lambda: train(elastic_worker, (1, 2), tmp_path), events)
    assert result.error is None and result.metrics["step"] == 6
    attempts = [told(tmp_path, f"from{first}", workers) for first, workers in ((0, 2), (2, 1), (4, 2))]
    assert [[rank["ranks"] for rank in attempt] for attempt in attempts] == [[2, 2], [1], [2, 2]]
    whole = ranks(2)(exact_loop)
    # Each size has the bits of a run of that size from the report before.
    assert [rank["losses"] for rank in attempts[0]] == [losses[:3] for losses, _ in whole]
    (alone,) = ranks(1)(exact_loop, attempts[1][0]["path"])
    assert attempts[1][0]["losses"] == alone[0][:3]
    again = ranks(2)(exact_loop, attempts[2][0]["path"])
    assert [rank["losses"] for rank in attempts[2]] == [losses for losses, _ in again]
    assert [rank["weights"] for rank in told(tmp_path, "end")] == [weights for _, weights in again]
    # And all of them are one run, with sums in another order.
    assert means(attempts[1]) == pytest.approx(means([{"losses": losses[2:5]} for losses, _ in whole]), rel=1e-12)
    assert means(attempts[2]) == pytest.approx(means([{"losses": losses[4:]} for losses, _ in whole]), rel=1e-12)


def means(found: list[dict[str, Any]]) -> list[float]:
    """Means over ranks of each step's losses."""
    each = [[float.fromhex(loss) for loss in rank["losses"]] for rank in found]
    return [sum(step) / len(step) for step in zip(*each, strict=True)]


def test_a_notice_of_preemption_makes_all_workers_report(ranks: Launcher, nodes: Nodes, tmp_path: Path) -> None:
    def events() -> None:
        all_at(tmp_path, "step3")
        nodes.give_notice(seconds=600)
        all_at(tmp_path, "step8")
        nodes.add()
        nodes.give_notice(seconds=1)  # at whose end Ray starts the workers anew, where nodes stay

    # None of this is a failure.
    result = during(lambda: train(noticed_worker, 2, tmp_path, failures=0), events)
    nodes.lose()
    # The notice came in the fourth step, and travelled with the fifth.
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [5, 12]
    found = told(tmp_path, "noticed")
    assert os.path.dirname(found[0]["path"]) == result.best_checkpoints[0][0].path
    # With another node in its place: the bits of a run without a preemption.
    assert [rank["losses"] for rank in found] == [losses[5:] for losses in ranks(2)(without_ray, 3, 2, placed=True)]


def test_loops_report_after_a_notice_and_go_on(nodes: Nodes, tmp_path: Path) -> None:
    def events() -> None:
        all_at(tmp_path, "before")
        nodes.give_notice(seconds=600)

    result = during(lambda: train(noticed_loops_worker, 2, tmp_path), events)
    reported = [metrics for _, metrics in result.best_checkpoints]
    assert [metrics.get("engine", metrics.get("accelerate")) for metrics in reported] == [1, 1, None]
    assert "loss" in reported[2] and os.listdir(tmp_path / "transformers") == ["checkpoint-1"]
    assert result.error is None
    # The node takes no workers any more.
    nodes.lose()
    nodes.add()
