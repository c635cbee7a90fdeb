"""Scripts as users start them, and what happens when one rank of a job fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end; nothing may outlive the limit."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "TORCHELASTIC"))}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([*command, str(folder)], cwd=folder, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("launcher", ["subprocess", "torchrun"])
def test_processes_of_their_own(launcher: str, tmp_path: Path) -> None:
    command = TORCHRUN if launcher == "torchrun" else [sys.executable]
    done = start([*command, str(SCRIPT), launcher], tmp_path)
    assert "result: zero3 True" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_fork_and_spawn_bring_the_weights_back(tmp_path: Path) -> None:
    done = start([sys.executable, str(SCRIPT), "multiprocessing"], tmp_path)
    assert "result: zero3_fork True zero2_spawn True" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_job(rank: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = start([sys.executable, str(SCRIPT), f"fail{rank}"], tmp_path)
    assert done.returncode != 0
    assert "this rank fails" in done.stderr
    assert time.monotonic() - begun < 60
