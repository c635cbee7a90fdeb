"""Writes inside `GatheredParameters`: kept with `modifier_rank`, else an error on all ranks, never lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.engine.trainings import KEPT, Setting, ShardedTraining
from tests.launcher import Launcher
from zero_strategy import fsdp as sharding
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import weighted_sum
from zero_strategy.optim.full_state import safe_get_full_fp32_param

STAGE_3 = Setting(3, "per_micro_batch")


@torch.no_grad()
def in_place(p: nn.Parameter) -> None:
    p.fill_(7.0)


def through_data(p: nn.Parameter) -> None:
    p.data.fill_(7.0)


def through_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] = 7.0


def of_one_element(p: nn.Parameter) -> None:
    p.data.view(-1)[-1] += 1.0


WRITES = [in_place, through_data, through_numpy, of_one_element]


def written(write: Callable[[nn.Parameter], None], by: list[int]) -> list[Any]:
    """Errors of two scopes of which the first is written to, and whether all values are as before."""
    training, model = ShardedTraining(STAGE_3), net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05))
    before = training.own.full_state_dict()
    found: list[Any] = []
    for named in ("blocks.1.up.weight", "head.bias"):
        try:
            with sharding.GatheredParameters(model.get_parameter(named)):
                if training.rank in by:
                    write(model.get_parameter(named))
        except RuntimeError as error:
            found.append(str(error))
    with sharding.GatheredParameters(model.parameters()):
        total = sum(p.pow(2).sum() for p in model.parameters())
        assert isinstance(total, Tensor) and total.isfinite()
    after = training.own.full_state_dict()
    loss_of(model(training.data(0, 2, 6))).backward()
    training.step()
    return [*found, all(torch.equal(before[name], after[name]) for name in before)]


@pytest.mark.parametrize("by", [[0, 1], [0], [1]], ids=["all", "first", "last"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_without_modifier_rank_are_an_error_on_all_ranks(
    ranks: Launcher, write: Callable[[nn.Parameter], None], by: list[int]
) -> None:
    for first, second, unchanged in ranks(2)(written, write, by):
        assert "'blocks.1.up.weight'" in first and f"rank(s) {by}" in first and "modifier_rank=0" in first
        assert "'head.bias'" in second
        assert unchanged


def written_beside_a_step() -> list[str]:
    """A step inside of the scope replaces what was written before it; scopes inside of one that keeps writes."""
    training, model = ShardedTraining(STAGE_3), net()
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.5))
    found = []
    for writes in (False, True):
        try:
            with sharding.GatheredParameters(model.parameters()):
                if writes:
                    model.blocks[2].down.bias.data.zero_()
                loss_of(model(training.data(0, 2, 6))).backward()
                training.step()
                model.load_state_dict(net(seed=3).state_dict())
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    training.zero_grad()
    scale = model.scale
    with sharding.GatheredParameters(scale, modifier_rank=1):
        scale.data.fill_(3.0)
        with sharding.GatheredParameters([scale]):
            scale.data.mul_(2.0)
    with sharding.GatheredParameters([scale]):
        with sharding.GatheredParameters(scale, modifier_rank=0):
            scale.data.add_(1.0)
        found.append(str(scale.item()))
    return found


def test_steps_loads_and_scopes_with_a_modifier_are_no_writes(ranks: Launcher) -> None:
    for quiet, lost, value in ranks(2)(written_beside_a_step):
        assert quiet == "no error"
        assert "'blocks.2.down.bias' were written to" in lost
        assert value == "7.0"


def written_in_a_forward() -> list[str]:
    training, model = ShardedTraining(STAGE_3), net()
    training.shard(model)
    found = []
    with training.own.forward_scope():
        try:
            with sharding.GatheredParameters(model.parameters()), torch.no_grad():
                model.head.weight.zero_()
            found.append("no error")  # without gradients: an exchange, as anywhere
        except RuntimeError as error:
            found.append(str(error))
        try:
            with sharding.GatheredParameters(model.parameters()):
                if training.rank == 1:
                    model.head.weight.detach().zero_()
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_writes_in_a_forward_are_an_error_where_they_are_made(ranks: Launcher) -> None:
    first, last = ranks(2)(written_in_a_forward)
    assert "'head.weight' were written" in first[0] and "'head.weight' were written" in last[0]
    assert first[1] == "no error" and "'head.weight' were written" in last[1]


def counted(config: dict[str, Any], dtype: torch.dtype) -> list[list[float]]:
    """Parameter and master copy after a step that follows writes which count; a step of length 0."""
    model: Any = net()
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, **config), compute_dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6, dtype=dtype))).backward()
    with sharding.GatheredParameters(model.parameters()):
        model.head.bias.data.fill_(3.0)
        with torch.no_grad():
            model.scale.fill_(2.0)
    optimizer.step()
    state = engine.full_state_dict()
    return [
        state["head.bias"].tolist(),
        safe_get_full_fp32_param(model.head.bias).tolist(),
        [state["scale"].item(), safe_get_full_fp32_param(model.scale).item()],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3, **KEPT.config},
        {"stage": 3, **KEPT.config, "offload": {"parameters": "cpu", "optimizer": "cpu"}},
    ],
    ids=["0", "1", "2", "kept", "kept, offloaded"],
)
def test_where_parameters_are_whole_writes_of_all_ranks_count(
    ranks: Launcher, config: dict[str, Any], dtype: torch.dtype
) -> None:
    for found in ranks(2)(counted, config, dtype):
        assert found == [[3.0] * 3, [3.0] * 3, [2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_hash_on_a_device_sees_every_bit_and_every_exchange(dtype: torch.dtype) -> None:
    values = torch.arange(1 << 21).remainder(251).to(dtype)
    known = int(weighted_sum(values))
    assert int(weighted_sum(values.clone())) == known
    for first, second in [(0, 1), (5, (1 << 20) + 5), (7, 1 << 20)]:
        other = values.clone()
        other[first], other[second] = values[second], values[first]
        assert int(weighted_sum(other)) != known
    values.view(torch.uint8)[-1] ^= 1
    assert int(weighted_sum(values)) != known
