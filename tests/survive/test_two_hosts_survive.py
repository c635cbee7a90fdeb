"""Two hosts in network namespaces: one dies, or the link between them is cut."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import INTERFACE, Host, two_hosts, why_not
from tests.survive.test_deaths import undisturbed

pytest.importorskip("torchft")

CONFIG = {"stage": 3}
STEPS = 150


def start(host: Host, number: int, head: Host, folder: Path, memory: Path, log: Path) -> None:
    words = [
        sys.executable, "-m", "zero_strategy.cli", "run", "--nproc-per-node", "2", "--nnodes", "2", "--node-rank",
        str(number), "--run-id", folder.name, "--address", host.address, "--lighthouse",
        f"http://{head.address}:29510", *(["--serve-lighthouse"] if host is head else []), "-m",
        "tests.survive.deaths", str(folder), json.dumps(CONFIG), str(STEPS), "[]",
    ]  # fmt: skip
    memory.mkdir()
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "ZERO_STRATEGY_MEMORY": str(memory), "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    host.start(words, environment, log)


def steps_of(folder: Path, least: float = 0.0) -> int:
    """The last step that has ended since a time."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return max((line["step"] for line in lines if line["time"] > least), default=-1)


@pytest.mark.parametrize("how", ["death", "cut", "store_cut"])
def test_a_host_goes_and_the_other_goes_on_from_its_copies(tmp_path: Path, how: str) -> None:
    """The first host has the store in which ranks meet; the one that goes on has the lighthouse."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "run"
    folder.mkdir()
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    stays, goes = (1, 0) if how == "store_cut" else (0, 1)
    with two_hosts() as hosts:
        for number, host in enumerate(hosts):
            start(host, number, hosts[stays], folder, tmp_path / f"memory{number}", logs[number])
        end = time.monotonic() + 200
        while steps_of(folder) < 10:
            assert time.monotonic() < end, "\n".join(log.read_text()[-3000:] for log in logs)
            time.sleep(0.05)
        if how == "death":
            hosts[goes].lose()
        else:
            hosts[goes].ip("link", "set", INTERFACE, "down")
        assert hosts[stays].processes[0].wait(200) == 0, logs[stays].read_text()[-4000:]
        if how != "death":
            # Cut off from the lighthouse, the other half ends by itself, and says why.
            assert hosts[goes].processes[0].wait(200) != 0, logs[goes].read_text()[-4000:]
            assert "Error: the lighthouse at " in logs[goes].read_text(), logs[goes].read_text()[-4000:]
    found = {file.read_text() for file in folder.glob("*.digest")}
    assert found == {undisturbed(tmp_path, CONFIG, STEPS)}, logs[stays].read_text()[-4000:]
