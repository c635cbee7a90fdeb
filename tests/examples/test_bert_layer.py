"""The BERT example: every run trains the same, and keeps less than the one before."""

from __future__ import annotations

from itertools import pairwise

import pytest

import bert_layer

SMALL = ["--layers", "2", "--hidden", "32", "--heads", "2", "--length", "24", "--batch", "4", "--vocabulary", "40"]


def test_options_save_memory_and_change_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    found = bert_layer.main([*SMALL, "--steps", "15", "--lr", "0.003", "--device", "cpu"])
    runs = list(found.values())
    assert all(after.kept < before.kept for before, after in pairwise(runs) if before is not runs[0])
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-3)  # rounding, grown by 15 steps
    assert runs[-1].losses[-1] < runs[0].losses[0]
    printed = capsys.readouterr().out
    assert all(name in printed for name in found) and "MB" in printed and "ms" in printed


def test_bert_layer_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bert_layer.main(["--help"])
    assert caught.value.code == 0 and "--vocabulary" in capsys.readouterr().out
