"""Four kills of `make torture`, in a process of its own: it forks, so it must have no threads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and PR_SET_PDEATHSIG")
def test_killed_runs_resume_as_if_nothing_had_happened(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.torture", "--rounds", "4", "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"nothing lost: [45] kills", done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []
