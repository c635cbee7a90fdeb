"""The plan knows states of 8 bits: it is what the engine then holds, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import Launcher
from tests.optim.test_state_bits import KINDS, Net, made, steps, tiers
from zero_strategy.config import load_config
from zero_strategy.optim import FusedAdamW
from zero_strategy.planning.ledger import Entry
from zero_strategy.planning.model_shape import ModelShape, optimizer_state, state_of


def held_and_planned(
    stage: int, kind: str, low: bool, config: dict[str, Any], snapshots: bool, path: str
) -> tuple[list[Entry], list[Entry]]:
    dtype = torch.bfloat16 if low else None
    settings = {"units": {"min_numel": 0}, "optimizer": {"state_bits": 8, "keep_32_bits": ["embed*"]}, **config}
    engine, optimizer = made(stage, kind, dtype, **settings)
    steps(engine, optimizer, 0, 2)
    if snapshots:
        engine.save(path, asynchronous=True).wait()
    found = engine.ledger().held().merged()
    with torch.device("meta"):
        net = Net()
    plan = load_config(stage=stage, **settings).plan(
        net,
        world_size=dist.get_world_size(),
        compute_dtype=dtype,
        optimizer=state_of(optimizer),
        device="cpu",
        snapshots=snapshots,
    )
    expected = plan.ledger(dist.get_rank()).held().merged()
    engine.close()
    return found, expected


@pytest.mark.parametrize("tier", ["memory", "host", "files"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_held_entries_are_those_of_the_plan(ranks: Launcher, tmp_path: Path, tier: str, kind: str) -> None:
    for world, stage, low in ((2, 1, True), (3, 3, False), (1, 0, True)):
        for found, expected in ranks(world)(held_and_planned, stage, kind, low, tiers(tmp_path)[tier], False, ""):
            assert found == expected, (world, stage, low)


@pytest.mark.parametrize("tier", ["memory", "files"])
def test_snapshots_of_the_plan(ranks: Launcher, tmp_path: Path, tier: str) -> None:
    given = (tiers(tmp_path)[tier], True, str(tmp_path / "saved"))
    for found, expected in ranks(2)(held_and_planned, 3, "adamw", False, *given):
        assert [replace(e, asked=0) for e in found] == [replace(e, asked=0) for e in expected]  # of copies it is taken


def test_bytes_per_parameter() -> None:
    shape = ModelShape.of(nn.Linear(1024, 1024, bias=False, device="meta"))
    numel = 1024 * 1024
    for bits, nbytes in ((32, 8 * numel), (8, 2 * numel + 8 * numel // 256)):
        config = load_config(stage=1, optimizer={"state_bits": bits})
        ledger = config.plan(shape, world_size=4, device="cpu").ledger()
        assert ledger.only(category="optimizer state").total.asked == nbytes // 4 + 4, bits  # and a step


def test_options_of_groups_win() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    assert state_of(FusedAdamW(parameters, state_bits=8)).bits == 8
    plain = state_of(KINDS["adamw"](parameters))
    assert plain.codable and plain.bits is None
    shape = ModelShape.of(nn.Linear(128, 128, bias=False, device="meta"))
    kept = load_config(optimizer={"state_bits": 8}).plan(shape, optimizer=replace(plain, bits=32), device="cpu")
    assert kept.ledger().only(category="optimizer state").total.asked == 8 * 128 * 128 + 4


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "Muon", "FusedLamb"])
def test_an_optimizer_without_a_form_of_8_bits_is_named(name: str) -> None:
    shape = ModelShape.of(nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=rf"optimizer\.state_bits is 8, and {name} keeps states"):
        load_config(optimizer={"state_bits": 8}).plan(shape, optimizer=optimizer_state(name), device="cpu")
