"""Rows of experts in reports, and the warning of a busy rank."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.experts.model import EXPERTS, batch, make
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.cli.report import report_data
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.diagnostics.run_files import read_run
from zero_strategy.experts.load import ExpertLoad


def recorded(folder: str) -> None:
    model = make()
    config = {"stage": 3, "mesh": {"expert": 2}, "diagnostics": {"run_dir": folder}}
    engine = ZeroEngine(model, {**config, "activation_checkpointing": {"mode": "full"}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    install_diagnostics(engine)
    for step in range(3):
        model(batch(dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(dist.get_rank(), step))
    engine.close()


def test_a_report_has_the_rows_of_all_ranks(ranks: Launcher, tmp_path: Path) -> None:
    """Those of training, once where layers are computed again: steps x ranks x tokens x choices."""
    ranks(4)(recorded, str(tmp_path))
    found = report_data(read_run(tmp_path))["experts"]
    assert [one["layer"] for one in found] == ["blocks.0.experts", "blocks.1.experts"]
    assert all(sum(one["rows"]) == 3 * 4 * 15 * 2 and len(one["rows"]) == EXPERTS for one in found)


def test_a_busy_rank_is_told_once() -> None:
    load = ExpertLoad("layers.3", 4, rank=0, ranks=2)
    even, uneven = torch.tensor([3, 3, 3, 3]), torch.tensor([1, 0, 8, 3])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(300):
            load.add(uneven if number % 10 else even)
    assert len(told) == 1
    text = str(told[0].message)
    assert "layers.3: rank 1 of 2 had 1.7" in text and "balance loss" in text
    assert load.take() == [360, 90, 2250, 900] and load.take() == [0] * 4
