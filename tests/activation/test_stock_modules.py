"""Every module of `torch.nn` in every mode of activation checkpointing: the bits of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.activation.stock_modules import STOCK, VARIANTS, WITHOUT_A_CASE, Around, Case, inputs_of
from tests.activation.test_offload import force
from tests.activation.unit_nets import seeded
from tests.launcher import Launcher
from zero_strategy.config import ZeroConfig, load_config
from zero_strategy.engine import ZeroEngine

CASES = {**{name: (name, case) for name, case in STOCK.items()}, **VARIANTS}
MODES = ("none", "selective", "budget", "full")
"""Here, where there is one unit, `every_n` is `full`."""


def numbers(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Loss, gradients of inputs and parameters, and buffers after one forward and backward."""
    inputs = [value.detach().requires_grad_(value.requires_grad) for value in inputs_of(case)]
    torch.manual_seed(5)
    loss = model(*inputs)
    loss.backward()
    found = {"loss": loss.detach(), "random": torch.get_rng_state()}
    found |= {f"input {n}": value.grad for n, value in enumerate(inputs) if value.grad is not None}
    found |= {f"parameter {n}": p.grad + 0 for n, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": value.clone() for n, value in model.named_buffers()}


@cache
def config_of(mode: str, stage: int) -> ZeroConfig:
    """Made once for all modules: to check one takes a good part of what a case takes."""
    units = {"min_numel": 0, "patterns": ["unit"]}
    return load_config(units=units, activation_checkpointing={"mode": mode}, stage=stage)


def ways(number: int) -> Iterator[tuple[str, ZeroConfig, bool]]:
    """A description, a config, and whether what autograd keeps is sent to the host and back.

    At stage 1 a unit's parameters are always there, which no mode depends on: one of them, by the case's number.
    """
    for mode, stage in [*((mode, 3) for mode in MODES), (MODES[number % len(MODES)], 1)]:
        yield f"{mode}, stage {stage}", config_of(mode, stage), False
    for mode in ("none", "selective"):  # with "full" only the unit's inputs move, whatever the module keeps
        yield f"{mode}, offloaded", config_of(mode, 3), True


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_stock_module_trains_in_every_mode_as_in_plain_torch(name: str, ranks: Launcher) -> None:
    kind, case = CASES[name]
    plain = seeded(Around, getattr(nn, kind), case)
    expected, wrong = numbers(deepcopy(plain), case), []
    assert any(key.startswith("parameter") for key in expected)
    for way, config, offloaded in ways(list(CASES).index(name)):
        model = deepcopy(plain)
        engine = ZeroEngine(model, config)
        if offloaded:
            force(engine)
        found = numbers(model, case)
        engine.close()
        assert found.keys() == expected.keys(), way
        wrong += [(way, key) for key in expected if not torch.equal(found[key], expected[key])]
    assert not wrong


def test_every_class_of_modules_has_a_case() -> None:
    exported = {name for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert exported == STOCK.keys() | WITHOUT_A_CASE.keys()
    assert not STOCK.keys() & WITHOUT_A_CASE.keys()
