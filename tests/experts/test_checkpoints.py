"""Checkpoints of divided experts: whole tensors under the model's names, for any number of ranks that divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.experts.model import Model, batch, make
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine


def started(config: dict[str, Any], seed: int = 0) -> tuple[Model, ZeroEngine, torch.optim.Optimizer]:
    model = make(seed)
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    return model, engine, optimizer


def run(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on two samples, whose halves or wholes ranks have."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        model(batch(0, step, samples=4)[rank * 4 // world : (rank + 1) * 4 // world]).backward()
        optimizer.step()
        optimizer.zero_grad()


def picture(engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(engine.full_state_dict())
    for name, state in engine.full_optimizer_state(optimizer).items():
        found |= {f"{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def save(config: dict[str, Any], folder: str) -> dict[str, Tensor]:
    model, engine, optimizer = started(config)
    run(model, optimizer, range(2))
    engine.save(folder)
    found = picture(engine, optimizer)
    engine.close()
    return found


def load(config: dict[str, Any], folder: str, again: str, steps: int = 0) -> dict[str, Tensor]:
    model, engine, optimizer = started(config, seed=5)
    engine.load(folder)
    engine.save(again)
    run(model, optimizer, range(2, 2 + steps))
    found = picture(engine, optimizer)
    engine.close()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


TARGETS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world, expert", [(2, 2), (4, 2), (4, 4)])
def test_saved_experts_load_for_any_ranks(ranks: Launcher, tmp_path: Path, world: int, expert: int, stage: int) -> None:
    folder = str(tmp_path / "saved")
    saved = ranks(world)(save, {"stage": stage, "mesh": {"expert": expert}}, folder)[0]
    for number, (others, parts) in enumerate(TARGETS):
        config = {"stage": 4 - stage, "mesh": {"expert": parts}}
        assert same(saved, ranks(others)(load, config, folder, str(tmp_path / f"again{number}"))[0])
    files = [sorted((tmp_path / f"again{number}").glob("*.safetensors")) for number in range(len(TARGETS))]
    assert all(files)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resumed_run_of_other_ranks_goes_on(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    """From whole experts to divided ones; sums in another order, in float64."""
    folder = str(tmp_path / "saved")
    ranks(1)(save, {"stage": stage}, folder)
    alone = ranks(1)(load, {"stage": stage}, folder, str(tmp_path / "one"), 3)[0]
    for world, expert in ((2, 2), (4, 2)):
        config = {"stage": stage, "mesh": {"expert": expert}}
        found = ranks(world)(load, config, folder, str(tmp_path / f"again{world}"), 3)[0]
        assert max(float((value - alone[name]).abs().max()) for name, value in found.items()) < 1e-12


def plain_weights(folder: str) -> bool:
    """The saved weights are those of a plain module of the same names and shapes."""
    from safetensors.torch import load_file

    values: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        values |= load_file(file)
    model = make(7)
    model.load_state_dict({name: value for name, value in values.items() if name in model.state_dict()})
    return True


def test_saved_weights_are_whole_under_the_names_of_the_model(ranks: Launcher, tmp_path: Path) -> None:
    ranks(4)(save, {"stage": 3, "mesh": {"expert": 4}}, str(tmp_path / "saved"))
    assert plain_weights(str(tmp_path / "saved"))
