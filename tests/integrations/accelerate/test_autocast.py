"""Autocast over parameters of stage 3: what its casts hold, what the plan says of them, and the warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations.accelerate.training import fresh_state
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.integrations import casts
from zero_strategy.integrations.accelerate import ZeroAccelerator

LAYERS, WIDTH = 8, 64
SETTINGS: dict[str, Any] = {"stage": 3, "units": {"min_numel": 1}}


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process: that of a test before this one, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Casts(TorchDispatchMode):
    """Memory of casts of weights to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    @property
    def alive(self) -> int:
        """Bytes of those that somebody holds."""
        return sum(nbytes for reference, nbytes in self.made if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and found.dtype == torch.bfloat16 and found.shape == (WIDTH, WIDTH):
            self.made.append((StorageWeakRef(found.untyped_storage()), found.nbytes))
        return found


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def held(grad: bool, handlers: list[Any] | None = None) -> tuple[int, int, int]:
    """Bytes of all casts in a forward, of those alive at the end of it, and as planned."""
    accelerator = ZeroAccelerator(
        zero_config=load_config(**SETTINGS), mixed_precision="bf16", cpu=True, kwargs_handlers=handlers
    )
    model = accelerator.prepare(layers())
    counting = Casts()
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


def test_the_plan_has_the_casts_of_a_training() -> None:
    made, alive, planned = held(True)
    assert alive <= planned == made


def test_a_cache_that_is_asked_for_is_left_aside() -> None:
    with pytest.warns(UserWarning, match="cache_enabled=True"):
        assert held(False, [AutocastKwargs(cache_enabled=True)])[1] == 0


def test_recomputed_units_plan_the_casts_of_one() -> None:
    plan = load_config(**SETTINGS, activation_checkpointing="full")
    ledger = plan.plan(layers(), autocast=torch.bfloat16, device="cpu").ledger(0)
    casts = sum(entry.taken for entry in ledger.only(category="activations") if "casts" in entry.owner.unit)
    assert casts == WIDTH * WIDTH * 2


def told(stage: int, **settings: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        patch.setattr(casts, "CASTS_TOLD", 1)
        config = load_config(stage=stage, units={"min_numel": 1}, **settings)
        with fresh_state():
            ZeroAccelerator(zero_config=config, mixed_precision="bf16").prepare(layers())
    return [str(one.message) for one in found if "float32" in str(one.message)]


def test_whole_copies_are_told_by_name(ranks: Launcher) -> None:
    first, second = ranks(2)(told, 3)
    assert not second and len(first) == 1
    for part in ("mixed_precision='bf16'", "'0.weight'", "model.to(torch.bfloat16)", "full"):
        assert part in first[0]
    assert ranks(2)(told, 2) == [[], []]
    assert ranks(2)(told, 3, activation_checkpointing="full") == [[], []]
