"""Bars: on a terminal, by the first rank, to the end; elsewhere nothing."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime import terminal as progress


class Terminal(io.StringIO):
    """Text that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def save_and_load(directory: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    engine.save(directory / "saved")
    engine.load(directory / "saved")


def test_building_saving_and_loading_show_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    with contextlib.redirect_stderr(Terminal()) as text:
        save_and_load(tmp_path)
    shown = text.getvalue()
    parameters = 4 * 3 * (64 * 64 + 64)
    for what in ("building units", "saving", "loading weights", "loading optimizer state"):
        assert re.search(rf"{what}: +0%", shown), what
        assert re.search(rf"{what}: 100%", shown), what
    assert f"{parameters / 1024:.1f}k/" in shown  # loaded weights, in the end


def test_other_ranks_and_files_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    with contextlib.redirect_stderr(io.StringIO()) as text:
        save_and_load(tmp_path)
    assert not text.getvalue()
    with contextlib.redirect_stderr(Terminal()) as text, progress.progress("saving", 3, rank=1) as tell:
        assert tell is None and list(progress.each("units", [1, 2], rank=1)) == [1, 2]
    assert not text.getvalue()
