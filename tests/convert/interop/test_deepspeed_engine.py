"""A DeepSpeed checkpoint goes on in our engine: the live state, then training as plain torch would go on from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.convert.interop.live import IMPLEMENTATION
from tests.convert.interop.written import script, unpack
from zero_strategy.config import load_config
from zero_strategy.convert import deepspeed
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import write_portable
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import full_state

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def net(case: str) -> nn.Module:
    made = script()
    made_case = made.CASES[case]
    torch.manual_seed(99)
    return made.Net(**{"empty": made_case.stage < 3, **made_case.model})


def optimizer_of(case: str, model: nn.Module) -> torch.optim.Optimizer:
    made = script()
    return torch.optim.AdamW(made.param_groups(model, made.CASES[case].groups), foreach=False)


def batch(step: int, rows: slice) -> torch.Tensor:
    return torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(step))[rows]


def go_on(case: str, source: Path, stage: int) -> dict[str, Any]:
    """State of the engine after loading, and the fp32 weights after some further steps; on any number of ranks."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = net(case)
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=20.0)
    engine = ZeroEngine(model, config, compute_dtype=DTYPES[script().CASES[case].precision])
    optimizer = optimizer_of(case, model)
    engine.attach(optimizer)
    path, client = engine.load_checkpoint(source)
    assert path is not None and client["epoch"] == 3
    names = dict(engine.model.names())
    found: dict[str, Any] = {
        "weights": engine.full_state_dict(),
        "fp32": {name: full_state.safe_get_full_fp32_param(p) for name, p in names.items()},
        "states": engine.full_optimizer_state(optimizer),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scale": None if engine.scaler is None else engine.scaler.scale,
    }
    found = copy.deepcopy(found)
    rows = 4 // world
    for step in range(STEPS):
        model(batch(step, slice(rank * rows, (rank + 1) * rows))).backward()
        optimizer.step()
        optimizer.zero_grad()
    found["after"] = {name: full_state.safe_get_full_fp32_param(p) for name, p in names.items()}
    return found


def plain(case: str, live: dict[str, Any], micro: int) -> dict[str, torch.Tensor]:
    """The fp32 weights after the same steps of plain torch, from the live state; batches in `micro` equal parts."""
    model = net(case)
    optimizer = optimizer_of(case, model)
    model.load_state_dict(live["weights"])
    for name, p in model.named_parameters():
        if name in live["states"]:
            state = dict(live["states"][name])
            optimizer.state[p] = {key: torch.as_tensor(value).clone() for key, value in state.items()}
    for group, values in zip(optimizer.param_groups, live["groups"], strict=True):
        group.update(settings(values))
    for step in range(STEPS):
        for part in range(micro):
            rows = 4 // micro
            (model(batch(step, slice(part * rows, (part + 1) * rows))) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION and key != "params"}


def check_loaded(found: dict[str, Any], live: dict[str, Any]) -> None:
    for name, value in live["weights"].items():
        mine = found["weights"][name]
        assert torch.equal(mine, value.to(mine.dtype)), name  # the engine casts buffers, too
    for name, value in live["fp32"].items():
        assert torch.equal(found["fp32"][name], value), name
    for name, values in live["states"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(found["states"][name][key]), torch.as_tensor(value)), (name, key)
    for mine, group in zip(found["groups"], live["groups"], strict=True):
        assert mine == {**mine, **settings(group)} and mine["foreach"] is False
    assert found["scale"] == live["loss_scale"]


CASES = ["z0_fp32_groups", "z1_groups", "z2_round_robin", "z3_sub_groups", "bf16_optimizer_groups", "z2_fp16"]


@pytest.mark.parametrize("case", CASES)
def test_one_process_goes_on(written, tmp_path, case):
    live = load_restricted(written / case / "live.pt")
    write_portable(deepspeed.read(written / case / "checkpoint"), tmp_path / "ours")
    for source in (tmp_path / "ours", written / case / "checkpoint"):  # converted, and directly
        found = go_on(case, source, stage=1)
        check_loaded(found, live)
        if script().CASES[case].precision == "fp32":
            expected = plain(case, live, micro=1)
            assert all(torch.equal(value, expected[name]) for name, value in found["after"].items())


@pytest.mark.parametrize("case", ["z1_groups", "z3_groups", "z2_fp16"])
def test_two_ranks_of_stage_3_go_on(written, ranks, case):
    live = load_restricted(written / case / "live.pt")
    first, second = ranks(2)(go_on, case, written / case / "checkpoint" / "global_step3", 3)
    for found in (first, second):
        check_loaded(found, live)
    assert all(torch.equal(first["after"][name], second["after"][name]) for name in first["after"])
    if script().CASES[case].precision == "fp32":
        expected = plain(case, live, micro=2)
        for name, value in first["after"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_our_loss_scale_grows_at_the_same_steps_as_deepspeeds():
    """DeepSpeed's rule, step by step, from states after any history."""
    from zero_strategy.config import LossScaleConfig
    from zero_strategy.convert.deepspeed_model import loss_scaler_state
    from zero_strategy.optim.loss_scale import LossScaler

    for window in (1, 2, 5):
        for overflows in ({}, {0}, {3}, {2, 3}, {1, 9}, {11}):
            scale, last = 2.0**16, -1
            for step in range(30):
                theirs = {"cur_scale": scale, "cur_iter": step, "last_overflow_iter": last, "scale_window": window}
                ours = LossScaler(LossScaleConfig(growth_interval=window, growth_delay=1))
                ours.load_state_dict(loss_scaler_state(theirs, skipped=0))
                follow(ours, theirs, overflows)
                finite = step not in overflows
                scale, last = after(theirs, finite)


def after(theirs: dict[str, Any], finite: bool) -> tuple[float, int]:
    scale, step, last = theirs["cur_scale"], theirs["cur_iter"], theirs["last_overflow_iter"]
    if not finite:
        return max(scale / 2, 1.0), step
    good = step - last - 1
    return (scale * 2 if good > 0 and good % theirs["scale_window"] == 0 else scale), last


def follow(ours: Any, theirs: dict[str, Any], overflows: Any) -> None:
    """Both scales are equal, over the overflows too."""
    for step in range(theirs["cur_iter"], 30):
        assert ours.scale == theirs["cur_scale"], (theirs, step)
        finite = step not in overflows
        ours.update(finite=finite)
        scale, last = after(theirs, finite)
        theirs = {**theirs, "cur_scale": scale, "last_overflow_iter": last, "cur_iter": step + 1}
