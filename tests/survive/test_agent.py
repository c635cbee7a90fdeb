"""The agent of a host: what it does when a process ends, is stopped or raises, and what the others do without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.survive.test_deaths import digests, kept_in_memory, run, undisturbed

pytest.importorskip("torchft")

CONFIG = {"stage": 3}


def start(
    folder: Path,
    steps: int,
    deaths: list[list[Any]],
    ranks: int = 2,
    config: Mapping[str, Any] = CONFIG,
    module: str = "tests.survive.deaths",
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "zero_strategy.cli", "run", "--nproc-per-node", str(ranks), "--run-id", folder.name,
        "-m", module, str(folder), json.dumps(config), str(steps), json.dumps(deaths),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(what: Callable[[], object], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return max((line["step"] for line in lines), default=-1)


def lighthouses(name: str) -> list[int]:
    """Processes of lighthouses that this run has started, by the folder in which they run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if command.split(b"\0")[0].endswith(b"torchft_lighthouse") and f"MARK={name}".encode() in environment:
            found.append(int(entry.name))
    return found


def test_an_error_ends_the_run_with_its_text(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nraise SystemExit('no good' if os.environ else 0)\n")
    command = [sys.executable, "-m", "zero_strategy.cli", "run", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1 and "no good" in done.stderr and "has ended with exit code 1" in done.stderr


def test_a_stopped_process_is_given_up_and_replaced(tmp_path: Path) -> None:
    """The others go on after two seconds; the agent kills it after ten, and another one takes its place."""
    run(tmp_path, CONFIG, [[5, "backward", 1, "SIGSTOP"]], 3, steps=400)
    assert digests(tmp_path) == {undisturbed(tmp_path, CONFIG, steps=400)}


def test_without_the_agent_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", tmp_path.name)
    agent = start(tmp_path, 120, [[40, "forward", 1]], ranks=3)
    wait_for(lambda: steps_of(tmp_path) > 2)
    agent.kill()
    wait_for(lambda: len(digests(tmp_path)) == 1 and len(list(tmp_path.glob("*.digest"))) == 2)
    assert digests(tmp_path) == {undisturbed(tmp_path, CONFIG, steps=120)}
    # Nothing stays: neither the lighthouse nor the copies.
    wait_for(lambda: not lighthouses(tmp_path.name) and f"zero_strategy.{tmp_path.name}" not in kept_in_memory())


def test_a_lighthouse_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", tmp_path.name)
    agent = start(tmp_path, 120, [[60, "forward", 1]], ranks=3)
    wait_for(lambda: steps_of(tmp_path) > 2)
    for pid in lighthouses(tmp_path.name):
        os.kill(pid, signal.SIGKILL)
    _, said = agent.communicate(timeout=200)
    assert agent.returncode == 0, said
    assert digests(tmp_path) == {undisturbed(tmp_path, CONFIG, steps=120)}
    assert not lighthouses(tmp_path.name)


def test_a_signal_ends_all(tmp_path: Path) -> None:
    agent = start(tmp_path, 100000, [])
    wait_for(lambda: steps_of(tmp_path) > 2)
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=100)
    assert agent.returncode == 128 + signal.SIGTERM
    assert f"zero_strategy.{tmp_path.name}" not in kept_in_memory()
