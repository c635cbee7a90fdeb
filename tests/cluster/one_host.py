"""Results of `tests/cluster/faces.py`, and the same training by ranks of one host, to compare them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.warm import plain_environment, run_warm_ranks

ROOT = Path(__file__).parents[2]
FACES = Path(__file__).with_name("faces.py")
Results = list[dict[str, Any]]


def read_results(folder: Path) -> Results:
    """By rank."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem.partition("-")[0]))
    return [json.loads(path.read_text()) for path in paths]


def on_one_host(tmp_path: Path, face: str, count: int, *words: str) -> Results:
    """That script under torchrun's variables."""
    folder = tmp_path / "one-host"
    env = plain_environment(PYTHONPATH=str(ROOT))
    done = run_warm_ranks(str(FACES), face, str(folder), *words, count=count, cwd=tmp_path, env=env)
    assert not any(one.returncode for one in done), "".join(one.stdout + one.stderr for one in done)
    return read_results(folder)


def trained(results: Results) -> list[Any]:
    """Losses of each rank, of so many ranks."""
    return [(one["losses"], one["group"]) for one in results]
