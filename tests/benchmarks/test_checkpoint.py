"""The checkpoint benchmark: its arithmetic is right, and suites run on a small model. No times are asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import figures, main
from benchmarks.disk_speed import Pattern, write_speed


def test_ratios_are_of_rounds() -> None:
    samples = {"with": [1.0, 1.4, 2.0, 2.8], "without": [1.0, 1.0, 2.0, 2.0]}
    assert figures("checksums", samples)["cost / save"]["median"] == pytest.approx(0.2)
    peer = {f"{turn} {what}": [value] * 2 for turn, value in (("A", 3.0), ("B", 2.0)) for what in ("save", "load")}
    peer |= {"A durable": [4.0, 4.0], "B durable": [2.0, 2.0]}
    found = figures("dcp", peer)
    assert found["save, peer / ours"]["median"] == 1.5 and found["durable, peer / ours"]["median"] == 2.0


def test_the_disk_is_measured_without_fio_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert write_speed(tmp_path, 3 << 20, Pattern(1 << 20, 2)) > 0
    assert list(tmp_path.iterdir()) == []


def test_suites_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    small = ["--model", "transformer-tiny", "--length", "8", "--rounds", "1", "--cold"]
    main([*small, "--suites", "dcp", "background", "--folder", str(tmp_path / "c"), "--out", str(out)])
    report = json.loads(out.read_text())["suites"]
    assert list(report) == ["dcp", "background"]
    assert all(found["median"] > 0 for found in report["background"]["figures"].values())
    assert "load, peer / ours" in capsys.readouterr().out
    assert list((tmp_path / "c").glob("c*")) == []
