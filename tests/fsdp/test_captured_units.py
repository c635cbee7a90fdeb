"""Modules that CUDA graphs are captured of, found by the settings that `torch.compile` tells."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.device.fake_ranks import fake_world
from tests.engine.nets import net
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.captured_units import captured_modules, warn_of_captures


def test_modules_with_graphs_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    model[0].compile(mode="reduce-overhead")
    model[1].compile()
    model[2].compile(backend="eager")
    model[3] = torch.compile(model[3], mode="max-autotune")  # type: ignore[assignment]
    model[4].compile(mode="max-autotune-no-cudagraphs")
    assert captured_modules(model) == ["0", "3"]
    with pytest.warns(UserWarning, match=r'^0, 3: compiled with CUDA graphs.*"max-autotune-no-cudagraphs", or take st'):
        warn_of_captures(model)


def test_what_is_compiled_as_a_whole_is_named() -> None:
    model = nn.Linear(2, 2)
    model.compile(options={"triton.cudagraphs": True})
    assert captured_modules(model) == ["the module"]


def test_nothing_is_told_without_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_captures(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(("stage", "device", "told"), [(3, "cuda", 1), (2, "cuda", 0), (3, "cpu", 0)])
def test_an_engine_looks_where_addresses_change(
    monkeypatch: pytest.MonkeyPatch, stage: int, device: str, told: int
) -> None:
    with fake_world(1, 2):
        model = net(depth=1)
        engine = ZeroEngine(model, load_config(stage=stage, watchdog="off"))
        engine.attach(torch.optim.SGD(model.parameters()))
        asked: list[nn.Module] = []
        monkeypatch.setattr("zero_strategy.optim.attached.warn_of_captures", asked.append)
        engine.model.device = torch.device(device)
        engine.check_optimizers()
        assert asked == [model] * told
        engine.close()
