"""The picture of the loss: what it reads and what its title says."""

import json
from pathlib import Path

import pytest

import plot_loss


def write_run(folder: Path, offset: float) -> Path:
    folder.mkdir()
    rows = [{"step": step, "bits_per_byte": 8.0 / step + offset} for step in range(1, 5)]
    rows.append({"step": 4, "val_bits_per_byte": 2.5 + offset / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_one_run(tmp_path: Path) -> None:
    output = tmp_path / "loss.png"
    assert plot_loss.plot([write_run(tmp_path / "run", 0.0)], output) == "validation: 2.500 bits per byte"
    assert output.read_bytes().startswith(b"\x89PNG")


def test_two_runs_and_their_difference(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "zero3", 0.0), write_run(tmp_path / "ddp", 0.25)]
    title = plot_loss.plot(runs, tmp_path / "loss.png")
    assert "0.2500 bits per byte apart in training" in title and "0.1250 in validation" in title


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(ValueError, match="no step in common"):
        plot_loss.largest_difference({1: 1.0}, {2: 1.0})
