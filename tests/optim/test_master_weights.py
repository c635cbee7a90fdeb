"""fp32 masters and moments of low-precision parameters are never rounded on the way through a call."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.engine.nets import Net, loss_of, net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.optim import full_state

BF16 = torch.bfloat16


def sharded(stage: int, dtype: torch.dtype = BF16, seed: int = 0) -> tuple[Net, ZeroEngine]:
    model = net(seed=seed)
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=5.0)
    return model, ZeroEngine(model, config, compute_dtype=dtype)


def data(step: int, dtype: torch.dtype = BF16) -> Tensor:
    """The same on all ranks, so that the mean gradient is that of one rank."""
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = BF16) -> None:
    for step in steps:
        loss_of(model(data(step, dtype)).float()).backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}


def changed(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [n for n in actual.keys() | expected.keys() if n not in actual or not torch.equal(actual[n], expected[n])]


# ----------------------------------------------------------------------------------------------------- weights


def kept_masters(stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Masters after calls that change no parameter, or one."""
    model, engine = sharded(stage, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    engine.attach(optimizer)
    train(model, optimizer, range(3), dtype)
    before = masters(model)
    finer = [name for name, value in before.items() if not torch.equal(value, value.to(dtype).float())]
    found: dict[str, Any] = {"finer": len(finer) > 5}
    for rank in (0, 1, None):
        with GatheredParameters(model.parameters(), modifier_rank=rank):
            pass
        found[f"gathered {rank}"] = changed(masters(model), before)
    model.state_dict()
    engine.full_state_dict()
    with torch.no_grad():
        model(data(9, dtype))
    found["read"] = changed(masters(model), before)

    with GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        model.blocks[1].up.weight[3, 2] = 0.3
    one = {name: value.clone() for name, value in before.items()}
    one["blocks.1.up.weight"][3, 2] = torch.tensor(0.3, dtype=dtype).float()
    found["one element"] = changed(masters(model), one)

    new = net(seed=7).state_dict()
    part = {name: new[name] for name in ("head.weight", "scale", "blocks.0.norm.bias")}
    model.load_state_dict(part, strict=False)
    found["loaded in part"] = changed(masters(model), one | part)
    model.load_state_dict(new)
    found["loaded"] = changed(masters(model), new)
    rounded = {name: value.to(dtype) for name, value in new.items()}
    found["shown"] = changed(model.state_dict(), rounded)
    train(model, optimizer, range(3, 4), dtype)
    found["trains on from them"] = [n for n, v in masters(model).items() if (v - new[n]).abs().max() > 1.01e-4]
    return found


@pytest.mark.parametrize("stage, dtype", [(0, BF16), (1, BF16), (2, torch.float16), (3, BF16), (3, torch.float16)])
def test_masters_stay_exact(ranks: Launcher, stage: int, dtype: torch.dtype) -> None:
    for found in ranks(2)(kept_masters, stage, dtype):
        assert found.pop("finer"), "else nothing could be lost"
        assert not any(found.values()), found


# --------------------------------------------------------------------------------------------------- gradients


def set_gradients(stage: int) -> list[str]:
    """Whole fp32 gradients written to a bf16 model, with and without a backward before, and the step from them."""
    model, engine = sharded(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    engine.attach(optimizer)
    wrong = []
    for step in range(2):
        if step:
            loss_of(model(data(step)).float()).backward()
        before, given = masters(model), {}
        for number, (name, p) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            given[name] = torch.randn(p.shape, generator=generator)
            full_state.safe_set_full_grad(p, given[name])
        for name, p in model.named_parameters():
            back = full_state.safe_get_full_grad(p)
            if back is None or back.dtype != torch.float32 or not torch.equal(back, given[name]):
                wrong.append(f"gradient {step} {name}")
        optimizer.step()
        expected = {name: value.sub(given[name], alpha=0.5) for name, value in before.items()}
        wrong += [f"step {step} {name}" for name in changed(masters(model), expected)]
        optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_set_whole_stay_float32(ranks: Launcher, stage: int) -> None:
    for wrong in ranks(2)(set_gradients, stage):
        assert not wrong


# ------------------------------------------------------------------------------------------------------ states


def loaded_whole(stage: int, other: int) -> dict[str, Any]:
    """A whole state, as `optimizer_state_dict` gives it, loaded into the same and another bf16 engine."""
    model, engine = sharded(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False, amsgrad=True)
    engine.attach(optimizer)
    train(model, optimizer, range(3))
    expected, whole = engine.full_optimizer_state(optimizer), engine.optimizer_state_dict(optimizer)
    copied = copy.deepcopy(whole)
    found: dict[str, Any] = {
        "finer": any(not torch.equal(v["exp_avg"], v["exp_avg"].bfloat16().float()) for v in expected.values())
    }
    second, again = sharded(other)
    taker = torch.optim.AdamW(second.parameters(), lr=0.7, foreach=False, amsgrad=True)
    again.attach(taker)
    for name, target, holder in (("same", engine, optimizer), ("other", again, taker)):
        target.load_optimizer_state_dict(holder, whole)
        state = target.full_optimizer_state(holder)
        found[name] = [
            f"{parameter} {key}"
            for parameter, values in expected.items()
            for key, value in values.items()
            if state[parameter][key].dtype != value.dtype or not torch.equal(state[parameter][key], value)
        ]
    found["names"] = sorted(expected) != sorted(name for name, _ in model.named_parameters())
    found["handed in"] = [
        key for number, values in whole["state"].items() for key, value in values.items()
        if not torch.equal(value, copied["state"][number][key])
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("stage, other", [(0, 3), (1, 0), (3, 1)])
def test_moments_loaded_whole_stay_float32(ranks: Launcher, stage: int, other: int) -> None:
    for found in ranks(2)(loaded_whole, stage, other):
        assert found.pop("finer"), "else nothing could be lost"
        assert not any(found.values()), found


def adagrad(stage: int, made: str, folder: str) -> list[str]:
    """Adagrad has its state from the start: of the parameters' dtype then. Against masters kept by hand.

    `made`: of fp32 parameters before the engine casts them, of bf16 ones before the engine, or after the engine.
    """
    fine_start = made == "of fp32"
    start = net() if fine_start else net().bfloat16().float()
    shadow = [nn.Parameter(p.detach().clone()) for p in start.parameters()]
    options: dict[str, Any] = {"lr": 0.05, "initial_accumulator_value": 0.1, "foreach": False}
    reference = torch.optim.Adagrad(shadow, **options)
    for state in reference.state.values():
        state["sum"] = state["sum"] if fine_start else state["sum"].bfloat16().float()
    plain = net().bfloat16()
    model = net() if fine_start else net().bfloat16()
    early = None if made == "after" else torch.optim.Adagrad(model.parameters(), **options)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=BF16)
    optimizer = early or torch.optim.Adagrad(model.parameters(), **options)
    engine.attach(optimizer)
    for step in range(4):
        loss_of(plain(data(step)).float()).backward()
        for p, fine in zip(plain.parameters(), shadow, strict=True):
            assert p.grad is not None
            fine.grad, p.grad = p.grad.float(), None
        reference.step()
        with torch.no_grad():
            for p, fine in zip(plain.parameters(), shadow, strict=True):
                p.copy_(fine)
        train(model, optimizer, range(step, step + 1))
        if step == 1:
            engine.save(folder)
            engine.load(folder)
    states, own = engine.full_optimizer_state(optimizer), masters(model)
    wrong = []
    for (name, _), fine in zip(model.named_parameters(), shadow, strict=True):
        sums, expected = states[name]["sum"], reference.state[fine]["sum"]
        if sums.dtype != torch.float32:
            wrong.append(f"{name}: sum is {sums.dtype}")
        if not torch.equal(sums, expected) or not torch.equal(own[name], fine):
            wrong.append(name)
    return wrong


MADE = {0: ("of fp32", "after"), 1: ("of bf16", "after"), 3: ("of fp32", "of bf16")}
"""By stage, when the optimizer is made: each on state that is divided, and each at two stages."""


@pytest.mark.parametrize("stage", MADE)
def test_adagrad_on_a_bf16_model(ranks: Launcher, stage: int, tmp_path: Path) -> None:
    for made in MADE[stage]:
        for wrong in ranks(2)(adagrad, stage, made, str(tmp_path / made)):
            assert not wrong, f"made {made}"


def follows(stage: int) -> tuple[int, int]:
    """Number of comparisons of master weights with their parameters: in steps, and after an edit."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 0}}, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    counts = []

    def steps() -> None:
        for _ in range(3):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with mock.patch.object(ParameterBucket, "_follow", autospec=True, side_effect=ParameterBucket._follow) as follow:
        steps()
        counts.append(follow.call_count)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        steps()
        counts.append(follow.call_count)
    return counts[0], counts[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_what_was_edited_is_compared(ranks: Launcher, stage: int) -> None:
    for quiet, edited in ranks(1)(follows, stage):
        assert quiet == 0 and edited == 1
