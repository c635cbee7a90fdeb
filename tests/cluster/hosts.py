"""Hosts for tests: network namespaces joined by virtual interfaces, each with processes and a name of its own.

    host 0: 10.99.0.1 --- veth --- 10.99.0.2 :host 1

Nothing outside of the namespaces has these addresses, so several pairs live side by side. Processes of a host are
children of one that is first in its PID namespace: the kernel ends them all with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "veth0"
_ESTABLISHED = "01"
"""A state in /proc/net/tcp."""
_pairs = itertools.count()
_ISOLATED = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: iproute2, util-linux and hostname are needed"
    name = f"zs{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add was refused: {made.stderr.strip()}"
    try:
        tried = subprocess.run(["ip", "netns", "exec", name, *_ISOLATED, "true"], capture_output=True, text=True)
        return f"unshare was refused: {tried.stderr.strip()}" if tried.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@dataclass
class Host:
    """One of the pair.

    Attributes:
        namespace: Its network's name.
        address: Its.
        name: Its own.
        processes: Those that `start` started.
    """

    namespace: str
    address: str
    name: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program there; what it prints goes to a file."""
        inside = ("sh", "-c", 'hostname "$0" && exec "$@"', self.name, *words)
        with open(log, "wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *_ISOLATED, *inside],
                env=dict(env), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def ip(self, *words: str) -> None:
        """`ip` in this host's network."""
        run("ip", "-n", self.namespace, *words)

    def lose(self) -> None:
        """All its processes are killed, and when their connections have ended with them its link goes down."""
        self.kill()
        end = time.monotonic() + 30
        while self._connections():
            assert time.monotonic() < end, f"processes of {self.namespace} live on"
            time.sleep(0.01)
        self.ip("link", "set", INTERFACE, "down")

    def _connections(self) -> int:
        """Those that are open at this end."""
        table = ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        lines = subprocess.run(table, capture_output=True, text=True, check=True).stdout.splitlines()
        return sum(line.split()[3] == _ESTABLISHED for line in lines)

    def kill(self) -> None:
        """The first process of each PID namespace, and by that all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def run(*words: str) -> None:
    """A command that has to succeed."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(names: tuple[str, str] | None = None) -> Iterator[tuple[Host, Host]]:
    """A pair; nothing is left of it at the end, whatever happened.

    Args:
        names: Of the hosts; default: those of their networks.
    """
    pair = next(_pairs)
    namespaces = [f"zs{os.getpid()}{letter}{pair or ''}" for letter in "ab"]
    hosts = tuple(
        Host(namespace, f"10.99.0.{1 + n}", name)
        for n, (namespace, name) in enumerate(zip(namespaces, names or namespaces, strict=True))
    )
    first, second = hosts
    try:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
        peer = ("peer", "name", INTERFACE, "netns", second.namespace)
        first.ip("link", "add", INTERFACE, "type", "veth", *peer)
        for host in hosts:
            host.ip("address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", INTERFACE, "up")
        yield first, second
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)
