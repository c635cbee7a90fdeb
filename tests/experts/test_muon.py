"""Muon on the experts of a layer, each a matrix of its own, where ranks divide them, against one process."""

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
from zero_strategy.optim.muon import MuonAdamW, newton_schulz, split_matrices

STEPS = 3


def optimizer_of(model: Model) -> MuonAdamW:
    split = split_matrices(
        model, ["blocks.*.dense.weight", "blocks.*.experts.up", "blocks.*.experts.down"], stacks=True
    )
    return MuonAdamW(split, muon={"lr": 0.02}, adamw={"lr": 1e-2}, ns_dtype="float32")


def alone(world: int) -> dict[str, Tensor]:
    model = make().float()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for rank in range(world):
            (model(batch(rank, step).float()) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train(config: dict[str, Any]) -> dict[str, Tensor]:
    model = make().float()
    engine = ZeroEngine(model, config)
    optimizer = optimizer_of(model)
    engine.attach(optimizer)
    for step in range(STEPS):
        model(batch(dist.get_rank(), step).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return found


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world, expert", [(2, 1), (2, 2), (4, 2)])
def test_muon_steps_on_each_expert(ranks: Launcher, world: int, expert: int, stage: int) -> None:
    found = ranks(world)(train, {"stage": stage, "mesh": {"expert": expert}})[0]
    assert furthest(found, alone(world)) < 5e-6


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_muon_of_experts_in_tiers_has_the_bits_of_memory(ranks: Launcher, tier: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"stage": 2, "mesh": {"expert": 2}}
    tiers = {"offload": {"optimizer": tier, "nvme_path": str(tmp_path)}}
    first, second = (ranks(4)(train, each)[0] for each in (config, {**config, **tiers}))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_step_on_a_stack_is_that_on_its_matrices() -> None:
    model = make().float()
    optimizer, up = optimizer_of(model), model.blocks[0].experts.up
    group = optimizer.param_groups[0]
    assert any(each is up for each in group["params"])
    model(batch(0, 0).float()).backward()
    assert up.grad is not None
    before, gradient = up.detach().clone(), up.grad.clone()
    optimizer.step()
    for number, matrix in enumerate(before):
        momentum = torch.zeros_like(matrix).lerp(gradient[number], 1 - group["momentum"])
        update = newton_schulz(gradient[number].lerp(momentum, group["momentum"]), group)
        wanted = matrix * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * max(1, 8 / 12) ** 0.5 * update
        assert torch.allclose(up[number], wanted, rtol=1e-5, atol=1e-7)
