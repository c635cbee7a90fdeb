"""Hosts whose names do not lead to them: the error of a rank says which address it took and which variable to set."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cluster.hosts import INTERFACE, Host, two_hosts, why_not
from zero_strategy.comm.gloo_address import VARIABLE, connecting_by_gloo, interfaces, name_address

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from datetime import timedelta
from zero_strategy import init_distributed
rank, store = int(sys.argv[1]), sys.argv[2]
init_distributed("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
print("connected")
"""


def start(host: Host, rank: int, store: Path, log: Path, interface: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != VARIABLE and not name.startswith("MASTER_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | ({VARIABLE: interface} if interface else {})
    host.start([sys.executable, "-c", CODE, str(rank), str(store)], env, log)


def first_to_end(hosts: tuple[Host, ...]) -> int:
    """Index of the host whose rank connects, in vain; gloo chooses it by the ports, and the other one waits for it."""
    end = time.monotonic() + 100
    while not (ended := [index for index, host in enumerate(hosts) if host.processes[0].poll() is not None]):
        assert time.monotonic() < end
        time.sleep(0.05)
    for host in hosts:
        host.kill()
    return ended[0]


def test_gloo_at_an_address_that_others_cannot_reach(tmp_path: Path) -> None:
    """The names of these hosts do not resolve, as those of many containers and virtual machines."""
    if reason := why_not():
        pytest.skip(reason)
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    with two_hosts() as hosts:
        for rank, host in enumerate(hosts):
            start(host, rank, tmp_path / "alone", logs[rank], None)
        which = first_to_end(hosts)
        text = logs[which].read_text()
        assert "RuntimeError: the ranks cannot connect by gloo: this one waits at 127.0.0.1, because" in text, text
        assert f"name '{hosts[which].namespace}' leads to no address" in text
        assert f"set {VARIABLE} on every host" in text
        assert f"{INTERFACE} ({hosts[which].address})" in text, "the interface to choose, with its address"
        for rank, host in enumerate(hosts):
            start(host, rank, tmp_path / "together", logs[rank], INTERFACE)
        for host, log in zip(hosts, logs):
            assert host.processes[1].wait(100) == 0 and "connected" in log.read_text(), log.read_text()


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "nosuch0")
    with pytest.raises(RuntimeError, match=rf"{VARIABLE} is 'nosuch0', and this host has no such.* lo \(127.0.0.1\)"):
        with connecting_by_gloo():
            dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"):
        with connecting_by_gloo():
            raise RuntimeError("something else")


def test_addresses_of_this_host() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    assert name_address("localhost") in ("127.0.0.1", "::1")
    assert name_address("no-such-name.invalid") is None
    assert name_address("192.0.2.1") is None, "it resolves, but is another host's"
