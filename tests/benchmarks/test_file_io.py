"""The benchmark of file I/O: its arithmetic is right, and it runs on a small file. No speeds are asserted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import file_io
from benchmarks.file_io import Pattern, figure, main


def test_above_one_we_are_faster() -> None:
    assert figure([[2.0, 1.0, 1.0, 2.0], [4.0, 2.0, 2.0, 4.0]]).median == pytest.approx(2.0)


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setattr(file_io, "patterns", lambda: [Pattern("psync", 1 << 20, 1)])
    out = tmp_path / "out.json"
    main(["--folder", str(tmp_path / "drive"), "--mib", "8", "--rounds", "1", "--seconds", "0.1", "--out", str(out)])
    report = json.loads(out.read_text())
    assert list(report["suites"]) == list(file_io.SUITES)
    assert all(found["ratio"]["median"] > 0 for found in report["suites"].values())
    assert list((tmp_path / "drive").iterdir()) == []
