"""Processes die in each phase of a step; the others end in the bits of a run that nobody has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.survive.deaths import Deaths, train
from zero_strategy.cli.report import goodput
from zero_strategy.diagnostics.run_files import read_run

pytest.importorskip("torchft")

STEPS = 24
PHASES = ("forward", "backward", "before the step", "after the step", "copy", "commit", "restore")


def run(
    folder: Path,
    config: dict[str, Any],
    deaths: list[list[Any]],
    ranks: int,
    steps: int = STEPS,
    module: str = "tests.survive.deaths",
    options: Sequence[str] = (),
    status: int = 0,
) -> str:
    """Run, and return the text on stderr; processes leave digests in the folder."""
    command = [
        sys.executable, "-m", "zero_strategy.cli", "run", "--nproc-per-node", str(ranks), *options, "-m", module,
        str(folder), json.dumps(config), str(steps), json.dumps(deaths),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stderr


def undisturbed(folder: Path, config: dict[str, Any], steps: int = STEPS) -> str:
    """The digest of one process that nothing disturbs."""
    return train(None, config, steps, Deaths(folder, []), lambda **_: None)


def digests(folder: Path) -> set[str]:
    return {file.read_text() for file in folder.glob("*.digest")}


def kept_in_memory() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("zero_strategy.*")]


@pytest.mark.parametrize("stage", [1, 3])
def test_deaths_in_every_phase(tmp_path: Path, stage: int) -> None:
    # Only the first rank commits.
    deaths: list[list[Any]] = [
        [2 + 3 * number, phase, 0 if phase == "commit" else number % 2] for number, phase in enumerate(PHASES[:-1])
    ]
    # Of one that begins anew, since one has died in this step before.
    deaths.append([2, "restore", 1])
    said = run(tmp_path, {"stage": stage}, deaths, 3)
    assert len(list(tmp_path.glob("death*"))) == len(deaths), said
    assert digests(tmp_path) == {undisturbed(tmp_path, {"stage": stage})}


def test_deaths_while_ranks_form_and_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """At the start, of one who is left, of one who comes; the last in the background save of a checkpoint."""
    deaths: list[list[Any]] = [[0, "form", 0], [3, "backward", 1], [3, "rebuild", 0], [0, "rejoin", 0], [11, "save", 1]]
    said = run(tmp_path, {"stage": 3}, deaths, 3)
    assert len(list(tmp_path.glob("death*"))) == len(deaths), said
    assert digests(tmp_path) == {undisturbed(tmp_path, {"stage": 3})}


def test_two_at_once_and_the_first_rank(tmp_path: Path) -> None:
    """The report tells of all, also of those of the rank that writes it."""
    deaths: list[list[Any]] = [[0, "begin", 0], [4, "backward", 0], [4, "backward", 1], [12, "forward", 0]]
    record = {"run_dir": str(tmp_path / "record"), "flops": False, "trace_steps": 0}
    run(tmp_path, {"stage": 2, "diagnostics": record}, deaths, 3)
    assert digests(tmp_path) == {undisturbed(tmp_path, {"stage": 2})}
    found = read_run(tmp_path / "record")
    assert found.numbers == list(range(1, STEPS + 1))
    first, *later = found.beginnings
    assert (first.before, first.after, first.stall) == (0, 3, 0.0)
    assert [each.number for each in later] == list(range(2, 2 + len(later)))
    # A loaded machine may hold more for dead; these are.
    assert [sum(each.again for each in later if each.step == step) for step in (4, 12)] == [1, 1]
    count = sum(len(each.went) for each in later)
    assert count >= 3 and {each.step for each in later if each.went} >= {4, 12} and all(each.why for each in later)
    assert all(each.stall is not None and 0 < each.stall == each.lost for each in later)
    lasted = max(each.time for records in found.steps.values() for each in records) - first.since
    assert goodput(found) == pytest.approx(1 - sum(each.lost for each in later) / lasted)
    # Loggers are told, by a rank that has come after the first deaths, too.
    lines = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert max(line["deaths"] or 0 for line in lines) == count


def test_ranks_that_do_not_divide_the_slots_wait(tmp_path: Path) -> None:
    """Of three that are left two go on, and the third joins when the fourth is there again."""
    config = {"stage": 3, "reproducible": 8}
    run(tmp_path, config, [[4, "backward", 1], [14, "forward", 3]], 4)
    assert digests(tmp_path) == {undisturbed(tmp_path, config)}
