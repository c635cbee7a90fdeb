"""A Trainer's fit goes on, bit for bit, in the processes that are left when one is killed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

LIGHTHOUSE = Path(sys.executable).parent / "torchft_lighthouse"
SECONDS = 60.0


class Nursery:
    """A process that has imported all and forks others, and a lighthouse."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "OMP_NUM_THREADS": "1"}
        self._lighthouse = subprocess.Popen(
            [LIGHTHOUSE, "--bind", address, "--min_replicas", "1", "--join_timeout_ms", "10000", "--quorum_tick_ms",
             "20", "--heartbeat_timeout_ms", "700"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.lightning.surviving"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ask("")

    def _ask(self, line: str) -> str:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        if line:
            self._parent.stdin.write(line + "\n")
            self._parent.stdin.flush()
        return self._parent.stdout.readline().strip()

    def start(self, result: Path, survive: bool, **environment: str) -> int:
        """Fork a process; its id."""
        spec = {"RESULT": str(result), "SURVIVE": survive, **self.environment, **environment}
        return int(self._ask(json.dumps(spec)))

    def close(self) -> None:
        for process in (self._parent, self._lighthouse):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def ended(pid: int) -> bool:
    """True once there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def result_of(path: Path) -> dict[str, Any]:
    assert path.exists(), path.with_suffix(".log").read_text()[-3000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same fit in one process that nobody disturbs."""
    path = tmp_path_factory.mktemp("undisturbed") / "plain.json"
    pid = nursery.start(path, survive=False)
    wait(lambda: ended(pid))
    return result_of(path)


class Fit:
    """Processes, of which one is killed."""

    def __init__(
        self, nursery: Nursery, folder: Path, victim: int, when: str, places: int = 3, **environment: str
    ) -> None:
        self._nursery, self.folder, self._run = nursery, folder, f"test{uuid.uuid4().hex[:8]}"
        self._environment = {"ZERO_STRATEGY_RUN": self._run, "ZERO_STRATEGY_RANKS": str(places), **environment}
        self.pids = [self.start(place, when if place == victim else "") for place in range(places)]
        self.victim = self.pids[victim]

    def start(self, place: int, when: str = "", name: str = "") -> int:
        """One more process."""
        path = self.folder / f"{name or place}.json"
        return self._nursery.start(
            path, True, ZERO_STRATEGY_PLACE=str(place), DIE=when, **self._environment
        )  # fmt: skip

    def results(self, *names: object) -> list[dict[str, Any]]:
        """Results of processes, once all have ended."""
        try:
            wait(lambda: all(map(ended, self.pids)))
            return [result_of(self.folder / f"{name}.json") for name in names]
        finally:
            shutil.rmtree(f"/dev/shm/zero_strategy.{self._run}", ignore_errors=True)


@pytest.mark.parametrize(
    ("victim", "when", "flags"),
    [
        (1, "3.1", {}),
        (2, "0.1", {"STAGE": "2"}),
        (1, "5.0", {"STAGE": "1"}),
        (1, "validation.5", {}),
        (2, "validation.10", {}),
    ],
    ids=["in a step", "in the first step", "in the next epoch", "in a validation", "in the last validation"],
)
def test_a_fit_goes_on_without_a_rank(
    nursery: Nursery,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    victim: int,
    when: str,
    flags: dict[str, str],
) -> None:
    fit = Fit(nursery, tmp_path, victim, when, 3, **flags)
    found = fit.results(*({0, 1, 2} - {victim}))
    for each in found:
        for name in ("digest", "step", "lr", "saved", "best"):
            assert each[name] == undisturbed[name], (name, fit.folder)
        assert each["world"] == 2
    # Each step once, in their order: also the one that was computed again.
    assert found[0]["curve"] == undisturbed["curve"]
    with next(tmp_path.glob("0/**/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(undisturbed["step"]))
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [4, 9]


def test_another_process_logs_on_where_the_first_has_died(
    nursery: Nursery, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    fit = Fit(nursery, tmp_path, 0, "3.1")
    found = fit.results(1, 2)
    for each in found:
        assert (each["digest"], each["step"], each["lr"]) == tuple(
            undisturbed[name] for name in ("digest", "step", "lr")
        )
    assert found[0]["rank"] == 0 and found[0]["curve"] == undisturbed["curve"][3:]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("when", ["saved.4", "leaves.4"])
def test_a_checkpoint_is_saved_again_with_its_step(
    nursery: Nursery, undisturbed: dict[str, Any], tmp_path: Path, when: str, background: bool
) -> None:
    """Ranks 0 and 2 have noted that they have saved, and rank 1 has not: all must save it again, under its name."""
    fit = Fit(nursery, tmp_path, 1, when, **({"BACKGROUND": "1"} if background else {}))
    for each in fit.results(*([0, 2] if when == "saved.4" else [0, 1, 2])):
        for name in ("digest", "step", "lr", "saved", "best"):
            assert each[name] == undisturbed[name], (name, fit.folder)


def test_a_new_process_takes_a_place(nursery: Nursery, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    fit = Fit(nursery, tmp_path, 1, "1.1", SLOW="0.1", BACKGROUND="1")
    wait(lambda: ended(fit.victim))
    fit.pids.append(fit.start(1, name="new"))
    for each in fit.results(0, "new", 2):
        assert (each["digest"], each["step"], each["lr"]) == tuple(
            undisturbed[name] for name in ("digest", "step", "lr")
        )
        assert each["world"] == 3
    assert fit.results(0)[0]["curve"] == undisturbed["curve"]


def test_a_rank_that_does_not_divide_the_slots_waits(nursery: Nursery, tmp_path: Path) -> None:
    """Two of three that are left go on; the third comes to their result when they have ended."""
    fit = Fit(nursery, tmp_path, 1, "2.0", places=4, SLOTS="4")
    found = fit.results(0, 2, 3)
    assert [each["world"] for each in found] == [2, 2, 1]
    assert len({each["digest"] for each in found}) == 1 and {each["step"] for each in found} == {16}
    assert [step for step, _ in found[0]["curve"]] == list(range(16))
