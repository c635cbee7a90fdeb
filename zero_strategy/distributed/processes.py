"""Whether other processes of this host are there: asked of the operating system, for one that is stopped or gone does
not answer, and one that computes in a single long call cannot.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

Condition = Literal["running", "stopped", "gone", "unknown"]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat, counted behind the name, which may hold anything."""


class ProcessCard(NamedTuple):
    """What a process can be found by.

    Attributes:
        host: Of this boot of its machine, and its PID namespace; empty where that cannot be said.
        pid: Its number there.
        started: When it was started, in the kernel's count: numbers are used again.
    """

    host: str
    pid: int
    started: int


def host() -> str:
    """This boot of this machine, and this PID namespace, without which a process number says nothing."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc shows the processes of another namespace
            return ""
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@cache
def _host_of(pid: int) -> str:
    return host()


def own_card() -> ProcessCard:
    """This process's."""
    try:
        fields = _fields(os.getpid())
    except OSError:
        fields = None
    return ProcessCard(host(), os.getpid(), int(fields[_STARTED]) if fields else 0)


def condition(card: ProcessCard) -> Condition:
    """Of a process; `unknown` for those of other hosts. One that a debugger holds is running."""
    if not card.host or card.host != _host_of(os.getpid()):
        return "unknown"
    try:
        fields = _fields(card.pid)
    except OSError:  # such as too many open files: of this process
        return "unknown"
    if fields is None or int(fields[_STARTED]) != card.started or fields[_STATE] in "ZXx":
        return "gone"
    return "stopped" if fields[_STATE] == "T" else "running"


def _fields(pid: int) -> list[str] | None:
    """None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
