"""The benchmark of the plan runs and agrees with the ledger; what the process took is not asserted here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory_plan import main


def test_plan_and_ledger_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    small = ["--model", "transformer-tiny", "--stages", "3", "--dtypes", "bfloat16"]
    main([*small, "--out", str(out)])
    found = json.loads(out.read_text())
    assert [entry["rank"] for entry in found] == [0, 1]
    assert all(entry["planned"] == entry["ledger"] > 0 for entry in found)
    assert all(entry["planned_peak"] > entry["planned"] for entry in found)
    assert "plan/ledger" in capsys.readouterr().out
