"""Parameters and gradients used where they are not whole: right where the docs say how, else an error by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import loss_of, net
from tests.engine.twins import DEFAULTS, Setting, ShardedTwin, Twin, play
from tests.launcher import Launcher
from zero_strategy.sharding import GatheredParameters

STAGE_3 = Setting(3, "per_micro_batch")


def penalty(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for p in model.parameters():
        total = total + p.pow(3).sum()
    return total


def train_with_penalty(twin: Twin) -> None:
    model = net()
    twin.shard(model)
    twin.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        with twin.scope():
            loss = loss_of(model(twin.data(step, 2, 6)))
            with GatheredParameters(model.parameters()):
                loss = loss + 0.01 * penalty(model)
        twin.note(loss)
        twin.backward(loss)
        twin.step()
        twin.zero_grad()
    if isinstance(twin, ShardedTwin) and twin.own.stage == 3:
        assert not any(bucket.gathered for unit in twin.own.model.units for bucket in unit.buckets)


def test_a_penalty_on_gathered_parameters_is_exact_at_every_stage(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, train_with_penalty, DEFAULTS, tolerance=1e-6):
        assert not wrong


def complaints() -> list[str]:
    """What `check_loss` says of a good loss, and of three that read released parameters."""
    twin = ShardedTwin(STAGE_3)
    model = net()
    twin.shard(model)
    x = twin.data(0, 2, 6)
    good = loss_of(model(x))
    found = []
    tied = nn.functional.linear(x, model.blocks[1].up.weight).sum() + loss_of(model(x))
    for loss in (good, good + penalty(model), good + model.blocks[0].up.weight.sum(), tied):
        try:
            twin.own.check_loss(loss)
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_a_loss_that_reads_released_parameters_is_refused(ranks: Launcher) -> None:
    for good, all_of_them, one, tied in ranks(2)(complaints):
        assert good == ""
        assert "and " in all_of_them and "more outside of their module's forward" in all_of_them
        assert "'blocks.0.up.weight' outside" in one and "GatheredParameters" in one
        assert "'blocks.1.up.weight' outside" in tied


USES: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "data": lambda g: g.data.norm(),
    "mul": lambda g: g * 2,
    "mul_": lambda g: g.mul_(2),
    "copy_": lambda g: g.copy_(torch.zeros(())),
    "item": lambda g: g.sum().item(),
    "isnan": lambda g: torch.isnan(g),
    "foreach": lambda g: torch._foreach_norm([g, g]),
    "clone": lambda g: g.clone(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "numpy": lambda g: g.numpy(),
    "stack": lambda g: torch.stack([g, g]),
}


def refusals(stage: int) -> dict[str, str]:
    twin = ShardedTwin(Setting(stage, "per_step" if stage == 1 else "per_micro_batch"))
    model = net()
    twin.shard(model)
    twin.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    twin.backward(loss_of(model(twin.data(0, 2, 6))))
    gradient = model.blocks[0].up.weight.grad
    assert gradient is not None
    found = {}
    for name, use in USES.items():
        try:
            use(gradient)
        except RuntimeError as error:
            found[name] = str(error)
    found["repr"] = repr(gradient)
    found["shape"] = f"{tuple(gradient.shape)} {gradient.dtype} {gradient.numel()} {gradient.is_sparse}"
    nn.utils.get_total_norm([torch.ones(2)])
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        found["clip"] = str(error)
    twin.zero_grad(set_to_none=False)
    twin.step()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_whole_refuses_to_be_read(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(refusals, stage):
        assert found.pop("repr") == f"GradientHandle('blocks.0.up.weight', shape=(12, 6), stage {stage})"
        assert found.pop("shape") == "(12, 6) torch.float32 72 False"
        assert "engine.clip_grad_norm_" in found.pop("clip")
        assert found.keys() == USES.keys()
        for message in found.values():
            assert f"'blocks.0.up.weight': at stage {stage} p.grad is no whole gradient" in message
