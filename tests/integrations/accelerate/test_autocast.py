"""Autocast over parameters of stage 3: what its casts hold, and what the plan says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs
from torch import nn

from tests.fsdp.test_autocast_copies import Casts
from zero_strategy.config import load_config
from zero_strategy.integrations.accelerate import ZeroAccelerator

LAYERS, WIDTH = 8, 64
SETTINGS: dict[str, Any] = {"stage": 3, "units": {"min_numel": 1}}


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def held(grad: bool, handlers: list[Any] | None = None) -> tuple[int, int, int]:
    """Bytes of all casts in a forward, of those alive at the end of it, and as planned."""
    accelerator = ZeroAccelerator(
        zero_config=load_config(**SETTINGS), mixed_precision="bf16", cpu=True, kwargs_handlers=handlers
    )
    model = accelerator.prepare(layers())
    counting = Casts({WIDTH * WIDTH})
    with torch.set_grad_enabled(grad), accelerator.autocast(), counting:
        output = model(torch.ones(2, WIDTH))
        alive = counting.alive
    del output
    plan = load_config(**SETTINGS).plan(layers(), autocast=torch.bfloat16, device="cpu").ledger(0)
    planned = sum(entry.taken for entry in plan.only(category="activations") if "casts" in entry.owner.unit)
    return sum(nbytes for _, nbytes in counting.made), alive, planned


def test_an_evaluation_holds_no_casts() -> None:
    made, alive, _ = held(False)
    assert made == LAYERS * WIDTH * WIDTH * 2 and alive == 0


def test_a_training_holds_no_casts_and_the_plan_has_those_of_one_unit() -> None:
    made, alive, planned = held(True)
    assert made == LAYERS * WIDTH * WIDTH * 2 and alive == 0 and planned == WIDTH * WIDTH * 2


def test_a_cache_that_is_asked_for_is_left_aside() -> None:
    with pytest.warns(UserWarning, match="cache_enabled=True"):
        assert held(False, [AutocastKwargs(cache_enabled=True)])[1] == 0


def planned_casts(**settings: Any) -> int:
    ledger = (
        load_config(units={"min_numel": 1}, **settings).plan(layers(), autocast=torch.bfloat16, device="cpu").ledger(0)
    )
    return sum(entry.taken for entry in ledger.only(category="activations") if "casts" in entry.owner.unit)


def test_units_that_are_made_again_plan_the_casts_of_one() -> None:
    assert planned_casts(stage=2) == LAYERS * WIDTH * WIDTH * 2
    assert planned_casts(stage=2, activation_checkpointing="full") == WIDTH * WIDTH * 2
    assert planned_casts(stage=3, activation_checkpointing="full") == WIDTH * WIDTH * 2
