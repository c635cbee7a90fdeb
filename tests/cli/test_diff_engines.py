"""`zero-strategy checkpoint diff` of what engines really saved: any ranks and stage, tiers, and faults of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cli.test_diff import Diff, diff
from tests.engine.nets import Net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

__all__ = ["diff"]
WIDTH = 20
"""With it slices of ranks end inside of tensors."""
SHAPES = [(1, 0), (2, 0), (2, 1), (2, 3), (3, 2), (3, 3)]
"""World size and stage."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make(stage: int, seed: int = 1, lr: float = 0.01, **options: Any) -> tuple[Net, ZeroEngine, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(width=WIDTH)
    engine = ZeroEngine(net, load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=10.0, **options))
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, foreach=False)
    engine.attach(optimizer)
    return net, engine, optimizer


def step(net: Net, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank())
    (net(torch.randn(4, WIDTH, generator=generator)).square().mean() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(folder: str, steps: int, stage: int, **options: Any) -> None:
    """A run that saves at every step."""
    net, engine, optimizer = make(stage, **options)
    for number in range(steps):
        step(net, optimizer, number)
        engine.save(f"{folder}/step{number + 1}")
    engine.close()


def save_again(source: str, target: str, stage: int, fault: str = "", **options: Any) -> None:
    """Load a checkpoint, do something to it on one rank or all, and save it."""
    net, engine, optimizer = make(stage, seed=9, **options)
    engine.load(source)
    if fault == "shard" and rank() == 1:
        for bucket in engine.model.buckets:
            bucket.shard.change(0, bucket.slice.stop - bucket.slice.start, lambda values: values.mul_(1.5))
    elif fault == "element":
        with torch.no_grad():
            net.stem.weight[3, 4] = 0.25
    elif fault == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    elif fault == "nan" and rank() == 1:
        for bucket in engine.model.buckets:
            bucket.shard.change(0, 1, lambda values: values.fill_(float("nan")))
    engine.save(target)
    engine.close()


@pytest.fixture(scope="module")
def saved(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    ranks(2)(train, str(folder / "run"), 2, 2)
    return folder / "run/step2"


@pytest.mark.parametrize(("world_size", "stage"), SHAPES)
def test_saved_again_by_others_it_is_equal(
    ranks: Launcher, saved: Path, tmp_path: Path, diff: Diff, world_size: int, stage: int
) -> None:
    ranks(world_size)(save_again, str(saved), str(tmp_path / "b"), stage)
    status, found, text = diff(saved, tmp_path / "b")
    # Random states are those of the ranks that saved: of as many ranks they were loaded.
    assert (status, found["differences"]) == (0, []) and found["tensors"] == found["equal"] > 60
    assert bool(found["layout"]) == ((world_size, stage) != (2, 2))
    assert "The two are equal" in text


@pytest.mark.parametrize(
    "options",
    [
        {"offload": {"optimizer": "cpu", "parameters": "cpu"}},
        {"offload": {"optimizer": "nvme", "parameters": "nvme"}},
        {"checkpoint": {"layout": "pieces"}},
    ],
    ids=["cpu", "nvme", "pieces"],
)
def test_tiers_and_pieces_are_no_difference(
    ranks: Launcher, saved: Path, tmp_path: Path, diff: Diff, options: dict[str, Any]
) -> None:
    if options.get("offload", {}).get("optimizer") == "nvme":
        options = {"offload": {**options["offload"], "nvme_path": [str(tmp_path / "state")], "probe_seconds": 0}}
    ranks(2)(save_again, str(saved), str(tmp_path / "b"), 3, **options)
    status, found, _ = diff(saved, tmp_path / "b")
    assert (status, found["differences"]) == (0, []) and "rank(s) at stage 3" in found["layout"][0]


@pytest.mark.parametrize("layout", ["auto", "pieces"])
def test_a_shard_that_one_rank_has_wrong(ranks: Launcher, saved: Path, tmp_path: Path, diff: Diff, layout: str) -> None:
    options = {} if layout == "auto" else {"checkpoint": {"layout": layout}}
    ranks(2)(save_again, str(saved), str(tmp_path / "b"), 3, fault="shard", **options)
    status, found, _ = diff(saved, tmp_path / "b", "--all")
    assert status == 1 and "written by rank 1 in B: a wrong reduction there" in found["conclusion"]
    assert {entry["where"] for entry in found["differences"]} == {"model"}
    for entry in found["differences"]:
        part = entry["places"]["first"]["part_b"]
        assert part["rank"] == 1 or (part["rank"] is None and part["count"] == 1)
        # Exactly the slice, but for elements that are zero.
        assert entry["places"]["start"] >= part["start"] and entry["places"]["stop"] <= part["stop"]


def test_planted_faults(ranks: Launcher, saved: Path, tmp_path: Path, diff: Diff) -> None:
    ranks(2)(save_again, str(saved), str(tmp_path / "element"), 0, fault="element")
    _, found, _ = diff(saved, tmp_path / "element")
    assert found["conclusion"].startswith("One element alone differs: element 64 of stem.weight at [3, 4]: ")
    assert "0.25 (0x3e800000) in B" in found["conclusion"]
    ranks(2)(save_again, str(saved), str(tmp_path / "lr"), 1, fault="lr")
    _, found, text = diff(saved, tmp_path / "lr")
    assert found["conclusion"] == "No tensor differs; different: lr of optimizer 0 group 0."
    assert "lr is 0.01 in A and 0.5 in B" in text
    ranks(2)(save_again, str(saved), str(tmp_path / "nan"), 3, fault="nan")
    _, found, _ = diff(saved, tmp_path / "nan")
    assert found["conclusion"].startswith("Only B has NaN, in ")
    places = found["differences"][0]["places"]
    assert places["nan_b"] == 1 and places["first"]["part_b"]["rank"] in (1, None)


def test_runs_of_engines(ranks: Launcher, tmp_path: Path, diff: Diff) -> None:
    ranks(2)(train, str(tmp_path / "a"), 3, 2)
    ranks(2)(train, str(tmp_path / "same"), 3, 3)
    ranks(2)(train, str(tmp_path / "seed"), 3, 2, seed=7)
    status, found, _ = diff(tmp_path / "a", tmp_path / "same")
    assert (status, found["steps"], found["read"]) == (0, [1, 2, 3], [])
    _, found, text = diff(tmp_path / "a", tmp_path / "seed")
    assert found["first"] == 1 and "differs from the first common step on" in found["at_first"]["conclusion"]
    assert "random state of rank 0: torch is seed 1, state " in text and "in A and seed 7, state " in text
