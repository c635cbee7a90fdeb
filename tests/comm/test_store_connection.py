"""Connections to a store: bounds of the kernel, and waits that end when the link to its host is cut."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cluster.hosts import INTERFACE, two_hosts, why_not
from zero_strategy.comm.store_connection import connect, second_connection
from zero_strategy.runtime.torch_private import TCPStore, socket_of, tcp_store_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bounds are those of Linux")


def bound_of(store: object) -> int:
    """Milliseconds without an acknowledgement."""
    plain = tcp_store_of(store)
    number = None if plain is None else socket_of(plain)
    assert number is not None
    with socket.socket(fileno=os.dup(number)) as connection:
        alive = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        milliseconds = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert bool(alive) == bool(milliseconds)
    return milliseconds


def test_a_further_connection_has_the_bound_of_the_first() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = dist.PrefixStore("a", dist.PrefixStore("b", connect("127.0.0.1", server.port, 7.0)))
    second = second_connection(first)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert bound_of(first) == bound_of(second) == 7000
    assert bound_of(second_connection(second)) == 7000
    assert bound_of(server) == bound_of(second_connection(server)) == 0


def test_a_store_that_takes_a_connection_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(dist.DistNetworkError):
        connect("127.0.0.1", silent.getsockname()[1], 1.0)


_SERVES = """
import sys, time
from zero_strategy.runtime.torch_private import TCPStore
store = TCPStore(sys.argv[1], 5555, is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(300)
"""
_WAITS = """
import sys
from datetime import timedelta
from threading import Thread
from zero_strategy.comm.store_connection import connect, second_connection

def end(store, wait):
    try:
        while True:
            wait(store)
    except RuntimeError as error:
        print("ended", type(error).__name__, flush=True)

first = connect(sys.argv[1], 5555, 5.0)
second = second_connection(first)
first.set_timeout(timedelta(seconds=300))
threads = [
    Thread(target=end, args=(first, lambda store: store.get("never"))),
    Thread(target=end, args=(second, lambda store: store.add("count", 1))),
]
for thread in threads:
    thread.start()
print("ready", flush=True)
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("cut", [0, 1])
def test_waits_end_when_the_link_is_cut(tmp_path: Path, cut: int) -> None:
    """At either end; one connection waits for an answer that is not due, the other one has just sent something."""
    if reason := why_not():
        pytest.skip(reason)
    logs = [tmp_path / "serves.log", tmp_path / "waits.log"]
    with two_hosts() as hosts:
        for host, script, log in zip(hosts, (_SERVES, _WAITS), logs, strict=True):
            host.start([sys.executable, "-c", script, hosts[0].address], os.environ, log)
            end = time.monotonic() + 120
            while "ready" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
        hosts[cut].ip("link", "set", INTERFACE, "down")
        assert hosts[1].processes[0].wait(120) == 0, logs[1].read_text()
    assert logs[1].read_text().count("ended DistNetworkError") == 2, logs[1].read_text()
