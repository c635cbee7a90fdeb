"""`torch.optim.LBFGS` at every stage, against torch's own on one process that has all ranks' data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import net
from tests.engine.test_bad_input import engine_for, message_of
from tests.launcher import Launcher
from zero_strategy.convert.convert import convert
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.lbfgs import DistributedLBFGS

OPTIONS: dict[str, dict[str, Any]] = {
    "strong_wolfe": {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"},
    "fixed": {"lr": 0.05, "max_iter": 3, "history_size": 2},
}
STEPS = 4


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs @ torch.ones(6, 3, dtype=torch.float64))


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> Callable[[], Tensor]:
    """Mean of the ranks' losses; `ranks` has one in the engine."""
    parts = [data(rank) for rank in ranks]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((model(x) - y).square().mean() for x, y in parts) / len(parts)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    return closure


def plain(world: int, options: dict[str, Any], steps: int = STEPS) -> tuple[list[float], nn.Module, torch.optim.LBFGS]:
    model = net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    losses = [float(optimizer.step(closure_of(model, optimizer, range(world))).detach()) for _ in range(steps)]
    return losses, model, optimizer


def sharded(stage: int, options: dict[str, Any], **config: Any) -> tuple[nn.Module, ZeroEngine, torch.optim.LBFGS]:
    model = net().double()
    engine = engine_for(model, stage, **config)
    optimizer = torch.optim.LBFGS(model.parameters(), **options)
    engine.attach(optimizer)
    return model, engine, optimizer


def steps_of(model: nn.Module, optimizer: torch.optim.LBFGS, steps: int = STEPS) -> list[float]:
    rank, _ = rank_and_world()
    return [float(optimizer.step(closure_of(model, optimizer, range(rank, rank + 1)))) for _ in range(steps)]


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest difference of two state dicts' tensors, relative to the largest value."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for key, value in wanted.items():
        for a, b in zip(*([x] if isinstance(x, Tensor) else x for x in (found[key], value)), strict=True):
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)))
    return worst


def compare(kind: str, stage: int) -> None:
    _, world = rank_and_world()
    losses, reference, torch_optimizer = plain(world, OPTIONS[kind])
    model, engine, optimizer = sharded(stage, OPTIONS[kind])
    found = steps_of(model, optimizer)
    assert found == pytest.approx(losses, rel=1e-9)
    assert distance(engine.full_state_dict(), reference.state_dict()) < 1e-8
    dicts = engine.optimizer_state_dict(optimizer), torch_optimizer.state_dict()
    state, wanted = (each["state"][0] for each in dicts)
    assert {key for key in wanted if key != "al"} == state.keys()
    assert state["n_iter"] == wanted["n_iter"] and state["func_evals"] == wanted["func_evals"]
    vectors = ("d", "prev_flat_grad", "old_dirs", "old_stps")
    assert distance({k: state[k] for k in vectors}, {k: wanted[k] for k in vectors}) < 1e-6
    if world == 1:
        assert found == losses
        assert all(map(torch.equal, engine.full_state_dict().values(), reference.state_dict().values()))


# All on two ranks; one rank and four have each line search once, at stages that divide and that do not.
@pytest.mark.parametrize(
    "world, stage, kind",
    [
        *((2, stage, kind) for stage in (0, 1, 2, 3) for kind in OPTIONS),
        (1, 0, "fixed"),
        (1, 2, "strong_wolfe"),
        (4, 1, "fixed"),
        (4, 3, "strong_wolfe"),
    ],
)
def test_lbfgs_is_that_of_one_process(ranks: Launcher, world: int, stage: int, kind: str) -> None:
    ranks(world)(compare, kind, stage)


def resumed(folder: str, stage: int, world: int) -> None:
    """Two steps, a checkpoint of one stage, two steps more at another stage and with the replicas' mesh."""
    _, reference, _ = plain(world, OPTIONS["strong_wolfe"])
    model, engine, optimizer = sharded(3, OPTIONS["strong_wolfe"])
    steps_of(model, optimizer, 2)
    engine.save(folder)
    state = engine.optimizer_state_dict(optimizer)
    replicas = {"replicate": 2} if world == 4 else {}
    model, engine, optimizer = sharded(stage, OPTIONS["strong_wolfe"], **({"mesh": replicas} if replicas else {}))
    engine.load(folder)
    loaded = engine.optimizer_state_dict(optimizer)["state"][0]
    assert loaded.keys() == state["state"][0].keys()
    assert distance({"old_dirs": loaded["old_dirs"]}, {"old_dirs": state["state"][0]["old_dirs"]}) == 0
    steps_of(model, optimizer, 2)
    assert distance(engine.full_state_dict(), reference.state_dict()) < 1e-8
    # torch's own form, into another engine
    other, there, second = sharded(1, OPTIONS["strong_wolfe"])
    there.load(folder)
    there.load_optimizer_state_dict(second, state)
    steps_of(other, second, 2)
    assert distance(there.full_state_dict(), reference.state_dict()) < 1e-8


@pytest.mark.parametrize("stage, world", [(1, 2), (2, 4), (0, 2)])
def test_state_goes_through_checkpoints(ranks: Launcher, tmp_path: Path, stage: int, world: int) -> None:
    ranks(world)(resumed, str(tmp_path), stage, world)


def fewer_ranks(folder: str) -> None:
    _, reference, _ = plain(4, OPTIONS["strong_wolfe"])
    model, engine, optimizer = sharded(1, OPTIONS["strong_wolfe"])
    engine.load(folder)

    def closure() -> Tensor:
        return closure_of(model, optimizer, range(4))()

    for _ in range(2):
        optimizer.step(closure)
    assert distance(engine.full_state_dict(), reference.state_dict()) < 1e-8


def saved(folder: str) -> None:
    model, engine, optimizer = sharded(3, OPTIONS["strong_wolfe"])
    steps_of(model, optimizer, 2)
    engine.save(folder)


def test_a_checkpoint_of_four_ranks_on_one(ranks: Launcher, tmp_path: Path) -> None:
    ranks(4)(saved, str(tmp_path))
    ranks(1)(fewer_ranks, str(tmp_path))


def converted(folder: str) -> None:
    """A file in torch's form goes on in plain torch, and comes back."""
    _, reference, _ = plain(1, OPTIONS["strong_wolfe"])
    saved(folder)
    convert(folder, f"{folder}/file.pt", to_format="torch")
    content = torch.load(f"{folder}/file.pt", weights_only=True)
    model = net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), **OPTIONS["strong_wolfe"])
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizers"][0])
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer, range(1)))
    assert distance(model.state_dict(), reference.state_dict()) < 1e-12
    convert(f"{folder}/file.pt", f"{folder}/again")
    model, engine, optimizer = sharded(2, OPTIONS["strong_wolfe"])
    engine.load(f"{folder}/again")
    steps_of(model, optimizer, 2)
    assert distance(engine.full_state_dict(), reference.state_dict()) < 1e-12


def test_files_in_torchs_form(ranks: Launcher, tmp_path: Path) -> None:
    ranks(1)(converted, str(tmp_path))


def begun_in_torch(stage: int) -> None:
    """State that the optimizer has before it is attached is divided."""
    _, reference, _ = plain(2, OPTIONS["fixed"])
    model = net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), **OPTIONS["fixed"])
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer, range(2)))
    optimizer.zero_grad()
    engine = engine_for(model, stage)
    engine.attach(optimizer)
    steps_of(model, optimizer, 2)
    assert distance(engine.full_state_dict(), reference.state_dict()) < 1e-8


def test_state_from_before_the_engine(ranks: Launcher) -> None:
    for stage in (1, 3):
        ranks(2)(begun_in_torch, stage)


def memory() -> dict[str, int]:
    model, engine, optimizer = sharded(2, {**OPTIONS["strong_wolfe"], "history_size": 3})
    steps_of(model, optimizer)
    own = engine.optimizers[0]
    numel = sum(p.numel() for p in model.parameters())
    return {"bytes": own.state_bytes(), "whole": (2 * 3 + 2) * numel * 8}


def test_history_is_divided(ranks: Launcher) -> None:
    found = ranks(4)(memory)
    total = sum(each["bytes"] for each in found)
    assert total == found[0]["whole"]
    assert max(each["bytes"] for each in found) <= total / 4 + 8 * 8 * 4 * 8  # slices of buckets, rounded up


def bad_steps() -> dict[str, str]:
    found = {}
    model, engine, optimizer = sharded(3, OPTIONS["fixed"])
    found["none"] = message_of(optimizer.step)  # type: ignore[arg-type]
    steps_of(model, optimizer, 1)
    found["nothing"] = message_of(lambda: optimizer.step(lambda: None))  # type: ignore[arg-type,return-value]
    engine.reset()
    before = engine.full_state_dict()
    calls = []

    def fails() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the data ran out")
        rank, _ = rank_and_world()
        return closure_of(model, optimizer, range(rank, rank + 1))()

    found["raises"] = message_of(lambda: optimizer.step(fails))
    found["after it"] = message_of(lambda: closure_of(model, optimizer, range(1))())
    engine.reset()
    assert not all(map(torch.equal, engine.full_state_dict().values(), before.values()))  # as in torch: half-way
    steps_of(model, optimizer, 1)
    model = net().double()
    engine = engine_for(model, 2, offload={"optimizer": "cpu"})
    found["offload"] = message_of(lambda: engine.attach(torch.optim.LBFGS(model.parameters())))
    return found


def test_bad_steps_are_named(ranks: Launcher) -> None:
    for found in ranks(2)(bad_steps):
        assert "optimizer.step(closure)" in found["none"]
        assert "TypeError" in found["nothing"] and "return the loss" in found["nothing"]
        assert found["raises"] == "ValueError: the data ran out"
        assert "engine.reset()" in found["after it"]
        assert "offload.optimizer='cpu'" in found["offload"] and "LBFGS" in found["offload"]


def skipped() -> None:
    model, engine, optimizer = sharded(3, OPTIONS["fixed"], nonfinite_gradients="skip")
    steps_of(model, optimizer, 1)
    before = engine.full_state_dict()
    rank, _ = rank_and_world()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(data(rank)[0]).sum() * (float("inf") if rank else 1.0)
        loss.backward()
        out: Tensor = loss
        return out

    optimizer.step(closure)
    assert all(map(torch.equal, engine.full_state_dict().values(), before.values()))
    steps_of(model, optimizer, 1)
    assert all(bool(value.isfinite().all()) for value in engine.full_state_dict().values())


def test_nonfinite_gradients_are_skipped_on_all_ranks(ranks: Launcher) -> None:
    ranks(2)(skipped)


class NoRanks:
    """Ranks that do not answer."""

    def all_gather_objects(self, value: Any) -> Any:
        raise ConnectionError


def test_an_exchange_that_fails_loses_no_history() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight], max_iter=5)
    optimizer.step(lambda: _closed(optimizer, weight))
    states: dict[Any, dict[str, Any]] = {weight: dict(optimizer.state[weight])}
    before = dict(states[weight])
    ranks: Any = NoRanks()
    with pytest.raises(ConnectionError):
        DistributedLBFGS(optimizer, ranks, ranks).begin([weight], states)
    assert states == {weight: before} and before["old_dirs"]


def _closed(optimizer: torch.optim.LBFGS, weight: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (weight - torch.arange(3.0)).pow(4).sum()
    loss.backward()
    return loss
