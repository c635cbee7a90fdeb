"""The schedules' values, by closed formulas; their state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_strategy.compat.deepspeed.schedules import (
    SCHEDULES,
    BatchSchedule,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

STEPS = 24


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.Adam(groups)


def values(schedule: BatchSchedule, steps: int = STEPS) -> list[float]:
    """Learning rate of the first group at each step: before the first `step()`, after one, ..."""
    found = []
    for _ in range(steps):
        found.append(float(schedule.optimizer.param_groups[0]["lr"]))
        assert schedule.get_last_lr()[0] == schedule.optimizer.param_groups[0]["lr"]
        schedule.step()
    return found


def check(schedule: BatchSchedule, formula: Callable[[int], float]) -> None:
    """`formula(n)` with n = -1 before the first `step()`."""
    assert values(schedule) == pytest.approx([formula(n) for n in range(-1, STEPS - 1)], rel=1e-12, abs=1e-15)


def test_range_test() -> None:
    options: dict[str, Any] = {
        "lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0
    }  # fmt: skip
    check(LRRangeTest(optimizer_of(), **options), lambda n: 0.01 * (1 + 2.0 * (n + 1) / 5))
    stairs = LRRangeTest(optimizer_of(), **options, lr_range_test_staircase=True)
    check(stairs, lambda n: 0.01 * (1 + 2.0 * ((n + 1) // 5)))


def triangle(n: int) -> float:
    """4 iterations up, 6 down."""
    return (n + 1) / 4 if n + 1 <= 4 else (10 - (n + 1)) / 6 if n < 9 else 0.0


def test_one_cycle_and_its_decay() -> None:
    options: dict[str, Any] = {
        "cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 6
    }  # fmt: skip
    check(OneCycle(optimizer_of(), **options), lambda n: 0.1 + 0.4 * triangle(n))
    decay = OneCycle(optimizer_of(), **options, decay_lr_rate=0.5, decay_step_size=3)
    check(decay, lambda n: 0.1 + 0.4 * triangle(n) if n < 10 else 0.1 / (1 + 0.5 * (n - 9) / 3))


def test_one_cycle_in_stairs() -> None:
    schedule = OneCycle(
        optimizer_of(), 0.0, 1.0, cycle_first_step_size=4, cycle_second_step_size=6,
        cycle_first_stair_count=2, cycle_second_stair_count=3,
    )  # fmt: skip
    expected = [0, 0, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0, 0]
    assert values(schedule, 12) == pytest.approx(expected, abs=1e-12)


def test_one_cycle_moves_momentum_the_other_way() -> None:
    schedule = OneCycle(
        optimizer_of(), 0.1, 0.5, cycle_first_step_size=4, cycle_second_step_size=6,
        cycle_min_mom=0.7, cycle_max_mom=0.9, decay_mom_rate=0.25, decay_step_size=2,
    )  # fmt: skip
    assert schedule.get_mom() == [(0.9, 0.99)]  # and so does DeepSpeed say, whose optimizer has the least by then
    found = []
    for _ in range(STEPS):
        found.append(schedule.optimizer.param_groups[0]["betas"])
        schedule.step()
    wanted = [0.9 - 0.2 * triangle(n) if n < 10 else 0.9 * (1 + 0.25 * (n - 9) / 2) for n in range(-1, STEPS - 1)]
    wanted[0] = 0.7  # as in DeepSpeed
    assert [first for first, _ in found] == pytest.approx(wanted) and {second for _, second in found} == {0.99}


def test_one_cycle_says_when_there_is_no_momentum_to_cycle() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(UserWarning, match="SGD has no betas"):
        schedule = OneCycle(sgd, 0.1, 0.5)
    assert schedule.get_mom() is None
    schedule.step()


def warm(n: int, kind: str) -> float:
    if n < 0:
        return 0.0
    return min(1.0, math.log(n + 1) / math.log(8) if kind == "log" else n / 8)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_and_what_follows(kind: str) -> None:
    options: dict[str, Any] = {
        "warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 8, "warmup_type": kind
    }  # fmt: skip
    check(WarmupLR(optimizer_of(), **options), lambda n: 0.1 + 0.4 * warm(n, kind))
    check(
        WarmupDecayLR(optimizer_of(), total_num_steps=18, **options),
        lambda n: 0.1 + 0.4 * (warm(n, kind) if n < 8 else max(0.0, (18 - n) / 10)),
    )


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_and_cosine(kind: str) -> None:
    def formula(n: int) -> float:
        if n < 0:
            return 0.0
        if n < 8:
            return 0.3 * (0.2 + 0.8 * warm(n, kind))
        return 0.3 * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, (n - 7) / 10))) / 2)

    schedule = WarmupCosineLR(
        optimizer_of(0.3), total_num_steps=18, warmup_min_ratio=0.2, warmup_num_steps=8, cos_min_ratio=0.05,
        warmup_type=kind,
    )  # fmt: skip
    check(schedule, formula)


def test_groups_have_values_of_their_own_and_tensors_stay_tensors() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    optimizer.param_groups[1]["lr"] = kept = torch.tensor(0.2)
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.0, 0.05], warmup_num_steps=2, warmup_type="linear")
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[1]["lr"] is kept and kept.item() == pytest.approx(0.125)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 5},
    "WarmupLR": {"warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_num_steps": 6, "total_num_steps": 15},
    "WarmupCosineLR": {"warmup_num_steps": 6, "total_num_steps": 15},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_state_goes_on(name: str) -> None:
    whole = values(SCHEDULES[name](optimizer_of(), **ARGUMENTS[name]))
    first = SCHEDULES[name](optimizer_of(), **ARGUMENTS[name])
    values(first, 7)
    assert first.state_dict() == {"last_batch_iteration": 6}
    second = SCHEDULES[name](optimizer_of(), **ARGUMENTS[name])
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    rest = []
    for _ in range(7, STEPS - 1):
        second.step()
        rest.append(second.get_last_lr()[0])
    assert rest == whole[8:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmupLR(optimizer_of(), warmup_num_steps=0), "warmup_num_steps must be a positive integer, not 0"),
        (lambda: WarmupLR(optimizer_of(), warmup_type="cubic"), "'log' or 'linear', not 'cubic'. DeepSpeed takes"),
        (lambda: WarmupLR(optimizer_of(), warmup_min_lr=[0.0, 0.0]), "warmup_min_lr has 2 values, the optimizer 1"),
        (lambda: OneCycle(optimizer_of(), 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size must be positive"),
        (lambda: LRRangeTest(optimizer_of(), lr_range_test_step_size=2.5), "lr_range_test_step_size"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_takes_an_optimizer() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, not list"):
        WarmupLR([])  # type: ignore[arg-type]


def test_a_run_shorter_than_its_warmup_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="total_num_steps 3 is less than warmup_num_steps 5"):
        WarmupDecayLR(optimizer_of(), 3, warmup_num_steps=5)
