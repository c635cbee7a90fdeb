"""Training with divided experts, against one process that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.experts.model import EXPERTS, Model, batch, make
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine

STEPS = 4


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(world: int, options: dict[str, int], accumulate: int = 1) -> dict[str, Tensor]:
    """Weights, losses and norms after some steps of one process on the data of all ranks."""
    model, norms = make(**options), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for micro in range(accumulate):
            for rank in range(world):
                (model(batch(rank, step * accumulate + micro)) / world / accumulate).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.detach() for name, value in model.state_dict().items()}
    for index, (name, _) in enumerate(model.named_parameters()):
        found[f"{name}/exp_avg"] = optimizer.state_dict()["state"][index]["exp_avg"]
    return {**found, "norms": torch.stack(norms).double()}


def train(
    config: dict[str, Any], options: dict[str, int], accumulate: int = 1, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The same, on ranks."""
    rank, model, norms = dist.get_rank(), make(**options).to(dtype), []
    engine = ZeroEngine(model, config)
    optimizer = optimizer_of(model)
    engine.attach(optimizer)
    for step in range(STEPS):
        for micro in range(accumulate):
            (model(batch(rank, step * accumulate + micro).to(dtype)) / accumulate).backward()
        norms.append(engine.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = dict(engine.full_state_dict())
    states = engine.full_optimizer_state(optimizer)
    found |= {f"{name}/exp_avg": state["exp_avg"] for name, state in states.items()}
    shape = tuple(model.blocks[0].experts.up.shape)
    engine.close(gather=True)
    back = {name: value.detach().clone() for name, value in model.state_dict().items()}
    same = all(torch.equal(value, found[name]) for name, value in back.items())
    loss = model(batch(0, 0).to(dtype)).detach()  # of the whole model, here alone
    return {**found, "norms": torch.stack(norms).double(), "shape": shape, "same": same, "loss": loss}


def differences(found: dict[str, Any], wanted: dict[str, Tensor]) -> float:
    """Largest difference of a tensor, over its largest value."""
    return max(float((found[n].double() - w).abs().max() / w.abs().max().clamp_min(1e-12)) for n, w in wanted.items())


MESHES = [
    (2, {"expert": 2}), (4, {"expert": 2}), (4, {"expert": 4}), (4, {"expert": 2, "replicate": 2}),
]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world, mesh", MESHES)
def test_divided_experts_train_as_one_process(ranks: Launcher, world: int, mesh: dict[str, int], stage: int) -> None:
    wanted = plain(world, {})
    norms = wanted.pop("norms")
    for found in ranks(world)(train, {"stage": stage, "mesh": mesh}, {}):
        assert found["shape"][0] == EXPERTS // mesh["expert"] and found["same"]
        assert differences(found, wanted) < 1e-11
        # A norm is given in float32.
        assert torch.allclose(found["norms"], norms, rtol=1e-6)


@pytest.mark.parametrize("options", [{"choices": 1}, {"choices": 8}, {"choices": 2, "only": 3}], ids=str)
def test_choices_of_few_and_of_all_experts(ranks: Launcher, options: dict[str, int]) -> None:
    """With `only` the second rank's experts get no token."""
    wanted = plain(2, options)
    del wanted["norms"]
    for found in ranks(2)(train, {"stage": 3, "mesh": {"expert": 2}}, options):
        assert differences(found, wanted) < 1e-11


SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": {"mode": "full"}},
    "per_step": {"gradient_reduction": "per_step"},
    "kept": {"reshard_after_forward": False},
    "small units": {"units": {"classes": ["Experts", "Block"]}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_train_divided_experts(ranks: Launcher, name: str) -> None:
    """Two micro-batches of a step each."""
    wanted = plain(4, {}, accumulate=2)
    del wanted["norms"]
    for found in ranks(4)(train, {"stage": 3, "mesh": {"expert": 2}, **SETTINGS[name]}, {}, 2):
        assert differences(found, wanted) < 1e-11


def test_stages_have_the_same_bits(ranks: Launcher) -> None:
    everyone = [ranks(4)(train, {"stage": stage, "mesh": {"expert": 2}}, {})[0] for stage in (1, 2, 3)]
    for other in everyone[1:]:
        assert all(torch.equal(value, other[name]) for name, value in everyone[0].items() if isinstance(value, Tensor))


TIERS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "cpu"}, "all": {"optimizer": "cpu", "parameters": "cpu"}, "files": {"optimizer": "nvme"},
}  # fmt: skip


@pytest.mark.parametrize("tier", TIERS)
def test_experts_in_tiers_have_the_bits_of_memory(ranks: Launcher, tier: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"stage": 3, "mesh": {"expert": 2}}
    offload = {**TIERS[tier], "nvme_path": str(tmp_path)}
    everyone = [ranks(4)(train, {**config, **more}, {}, 1, torch.float32)[0] for more in ({}, {"offload": offload})]
    assert all(
        torch.equal(value, everyone[1][name]) for name, value in everyone[0].items() if isinstance(value, Tensor)
    )
