"""Forks of a script of its own, for groups of more ranks than tests run with: each rank leaves its findings in a file.

A script calls `fork_ranks`, and a test `found_by_forks(script, ranks, folder)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def fork_ranks(rank: Callable[[int, int, Path], Any]) -> None:
    """Run `rank(number, ranks, folder)` in as many forks as the command line says, and print what each returns."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for number in range(ranks):
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            (folder / f"{number}.json").write_text(json.dumps(rank(number, ranks, folder)))
            os._exit(0)
        children.append(child)
    assert not any(os.waitpid(child, 0)[1] for child in children)
    print(json.dumps([json.loads((folder / f"{number}.json").read_text()) for number in range(ranks)]))


def found_by_forks(script: Path, ranks: int, folder: Path) -> list[Any]:
    """The findings of each rank of such a script."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(ranks), str(folder)],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found
