"""Scripts as users start them, and what happens when one rank of a job fails."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.warm import plain_environment, run_warm_script

SCRIPT = str(Path(__file__).with_name("launched.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`python WORDS FOLDER`, run to the end; what it starts has to load all libraries, only itself it has not."""
    return run_warm_script(*words, str(folder), cwd=folder, env=plain_environment(), timeout=300)


@pytest.mark.parametrize("launcher", ["subprocess", "torchrun"])
def test_processes_of_their_own(launcher: str, tmp_path: Path) -> None:
    done = start(*(TORCHRUN if launcher == "torchrun" else []), SCRIPT, launcher, folder=tmp_path)
    assert "result: zero3 True" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_fork_and_spawn_bring_the_weights_back(tmp_path: Path) -> None:
    done = start(SCRIPT, "multiprocessing", folder=tmp_path)
    assert "result: zero3_fork True zero2_spawn True" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_ends_the_job(rank: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = start(SCRIPT, f"fail{rank}", folder=tmp_path)
    assert done.returncode != 0
    assert "this rank fails" in done.stderr
    assert time.monotonic() - begun < 60
