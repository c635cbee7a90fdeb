"""Divided experts beside what reads, averages, publishes and changes weights; what cannot be is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.experts.model import EXPERTS, WIDTH, Model, batch, make
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, subscribe
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.optim.full_state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

EXPERTS_OF_TWO = {"expert": 2}


def trained(
    config: dict[str, Any], steps: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Model, ZeroEngine, torch.optim.Optimizer]:
    """Some steps on samples of each rank."""
    model = make().to(dtype)
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, engine, optimizer


def backward(model: Model, step: int) -> None:
    model(batch(dist.get_rank(), step).to(model.head.weight.dtype)).backward()


def published(config: dict[str, Any], folder: str) -> list[bool]:
    """True for each version that a reader has as the engine does; and of the weights that are iterated."""
    model, engine, optimizer = trained(config)
    found = []
    publisher = engine.publish(to=folder)
    reader = subscribe(folder)
    for step in range(3, 6):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        publisher.update()
        whole = engine.full_state_dict()
        reader.update()
        values = dict(reader.tensors)
        found.append(values.keys() == whole.keys() and all(torch.equal(values[n], t) for n, t in whole.items()))
        iterated = {name: value.clone() for name, value in engine.weights()}
        found.append(all(torch.equal(iterated[name], value) for name, value in whole.items()))
    publisher.close()
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_readers_get_all_experts(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    for found in ranks(4)(published, {"stage": stage, "mesh": EXPERTS_OF_TWO}, str(tmp_path)):
        assert found and all(found)


def averaged(config: dict[str, Any]) -> dict[str, Tensor]:
    model, engine, optimizer = trained(config, 1, torch.float64)
    average = engine.average_weights(0.5)
    for step in range(1, 4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    with average.applied():
        found = engine.full_state_dict()
    engine.close()
    return found


def plainly_averaged(world: int) -> dict[str, Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average: dict[str, Tensor] = {}
    for step in range(4):
        for rank in range(world):
            (model(batch(rank, step)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = {name: value.detach().clone() for name, value in model.named_parameters()}
        average = now if step < 2 else {name: 0.5 * (average[name] + value) for name, value in now.items()}
    return average


@pytest.mark.parametrize("stage", [2, 3])
def test_averages_of_divided_experts(ranks: Launcher, stage: int) -> None:
    wanted = plainly_averaged(2)
    for found in ranks(2)(averaged, {"stage": stage, "mesh": EXPERTS_OF_TWO}):
        assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-12) for name, value in wanted.items())


def by_settings(config: dict[str, Any]) -> dict[str, Tensor]:
    _, engine, _ = trained(config, steps=3)
    found = engine.full_state_dict()
    engine.close()
    return found


def test_changes_of_parameters_beside_divided_experts(ranks: Launcher) -> None:
    config: dict[str, Any] = {"stage": 1, "mesh": EXPERTS_OF_TWO}
    coded = {**config, "communication": {"parameters": "delta"}}
    first, second = (ranks(4)(by_settings, each)[0] for each in (config, coded))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def whole_states(stage: int) -> dict[str, bool]:
    """Whole values, gradients and states of a parameter of experts are read and set on all ranks."""
    model, engine, optimizer = trained({"stage": stage, "mesh": EXPERTS_OF_TWO})
    backward(model, 7)
    parameter, found = model.blocks[0].experts.up, dict[str, bool]()
    name = "blocks.0.experts.up"
    value = safe_get_full_fp32_param(parameter)
    found["value"] = torch.equal(value, engine.full_state_dict()[name])
    gradient, state = safe_get_full_grad(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
    assert gradient is not None and state is not None
    found["shapes"] = value.shape == gradient.shape == state.shape and len(value) == EXPERTS
    safe_set_full_fp32_param(parameter, value + 1)
    safe_set_full_grad(parameter, gradient * 2)
    safe_set_full_optimizer_state(parameter, state * 3, "exp_avg")
    found["set value"] = torch.equal(safe_get_full_fp32_param(parameter), value + 1)
    again, once_more = safe_get_full_grad(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
    assert again is not None and once_more is not None
    found["set gradient"] = torch.equal(again, gradient * 2)
    found["set state"] = torch.equal(once_more, state * 3)
    shown = parameter.grad
    found["own gradient"] = shown is not None and shown.shape == parameter.shape
    found["own part"] = parameter.shape[0] == EXPERTS // 2
    optimizer.zero_grad()
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_values_of_divided_experts(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(whole_states, stage):
        assert all(found.values()), found


def loaded_states(stage: int) -> bool:
    """True if the state of one process's optimizer is that of ranks that load it."""
    model = make().float()
    alone = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch(0, 0).float()).backward()
    alone.step()
    other = make().float()
    engine = ZeroEngine(other, {"stage": stage, "mesh": EXPERTS_OF_TWO})
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    engine.attach(optimizer)
    engine.load_optimizer_state_dict(optimizer, alone.state_dict())
    states = engine.full_optimizer_state(optimizer)
    names = dict(model.named_parameters())
    same = all(torch.equal(states[n]["exp_avg_sq"], alone.state[p]["exp_avg_sq"]) for n, p in names.items())
    engine.close()
    return same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_state_is_loaded_by_ranks_with_some_experts(ranks: Launcher, stage: int) -> None:
    assert all(ranks(2)(loaded_states, stage))


# ---- refused ----


class Shared(nn.Module):
    """Experts beside a parameter of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def expert_parameters(self) -> list[str]:
        return ["up"]

    def number_of_experts(self) -> int:
        return EXPERTS

    def hold_experts(self, count: int) -> None:
        raise AssertionError("refused before")


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


def write_alone(model: Model) -> None:
    with GatheredParameters(model.parameters(), modifier_rank=0):
        pass


def refusals() -> dict[str, str]:
    found = {}
    found["none"] = message_of(lambda: ZeroEngine(nn.Linear(2, 2), {"mesh": EXPERTS_OF_TWO}))
    found["shared"] = message_of(lambda: ZeroEngine(Shared(), {"mesh": EXPERTS_OF_TWO}))
    found["skip"] = message_of(
        lambda: ZeroEngine(make(), {"stage": 3, "mesh": EXPERTS_OF_TWO, "units": {"may_skip": True}})
    )
    found["size"] = message_of(lambda: ZeroEngine(make(), {"mesh": {"expert": 3}}))
    found["replicas"] = message_of(lambda: ZeroEngine(make(), {"mesh": {"expert": 2, "replicate": 2}}))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    found["fully_shard"] = message_of(lambda: ZeroEngine(sharded, {"stage": 3}))
    model, engine, _ = trained({"stage": 1, "mesh": EXPERTS_OF_TWO})
    found["copy"] = message_of(lambda: copy.deepcopy(model))
    found["writer"] = message_of(lambda: write_alone(model))
    found["call"] = message_of(
        lambda: model.blocks[0].experts(torch.ones(2, WIDTH), torch.ones(2, 1), torch.ones(2, 1))
    )
    engine.close()
    return found


def test_bad_settings_are_named(ranks: Launcher) -> None:
    for found in ranks(2)(refusals):
        assert "Linear has no layer of experts" in found["none"] and "mesh.expert" in found["none"]
        assert "['scale']" in found["shared"]
        assert "units.may_skip" in found["skip"]
        assert "mesh.expert is 3" in found["size"] and "1, 2" in found["size"]
        assert "mesh.expert is 2" in found["replicas"]
        assert "divided by fully_shard" in found["fully_shard"]
        assert "deepcopy" in found["copy"] and "close(gather=True)" in found["copy"]
        assert "modifier_rank 0 would write ['blocks.0.experts.up'" in found["writer"]
        assert "blocks.0.experts was called with" in found["call"]


def uneven(stage: int) -> str:
    model, engine, _ = trained({"stage": stage, "mesh": EXPERTS_OF_TWO})
    model.eval()

    def evaluate() -> None:
        for step in range(2 - dist.get_rank()):
            with engine.evaluation.shared_step(), torch.no_grad():
                model(batch(0, step).float())
        engine.evaluation.drain()

    found = message_of(evaluate)
    engine.close()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_uneven_evaluation_of_divided_experts_is_refused(ranks: Launcher, stage: int) -> None:
    for text in ranks(2)(uneven, stage):
        assert "ranks [1] have run out" in text
