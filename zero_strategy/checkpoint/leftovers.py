"""What crashed saves left behind in a folder of checkpoints.

A temporary directory says who writes it, and so does a mark, a file that is there for a moment only. They go when
another save begins in the same folder and that process is gone for certain: it ran on this host, in this boot and in
this PID namespace, where its number is free or another process has it. In a container the same number is another
process, so whatever another namespace, boot or host left behind cannot be told from what it is still writing, and
stays, with a warning where it is likely to be a leftover.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.replace import all_beside, remove

OWNER_NAME = "owner.json"
MARK = ".seen"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"


def sign(directory: Path) -> None:
    """Leaves this process's name in a directory."""
    leave_mark(directory / OWNER_NAME)


def leave_mark(path: Path) -> None:
    """Writes a file that says that this process wrote it."""
    path.write_text(json.dumps(_this_process()))


def mark_name(token: str, rank: int) -> str:
    """A rank's mark in a folder of checkpoints, of a name that `remove_leftovers` knows."""
    return f"{MARK}.{token}.{rank}"


def remove_leftovers(parent: Path, receipts: str) -> None:
    """Removes what writers who are gone left behind, and warns of what may be a leftover and is kept.

    Args:
        parent: A folder of checkpoints.
        receipts: Name of the directory inside of a temporary one that its writer signed.
    """
    for path in parent.glob(".*.*.tmp"):
        _remove(path, _judge(path / receipts / OWNER_NAME))
    for path in parent.glob(f"{MARK}.*.*"):
        _remove(path, _judge(path))


def remove_leftovers_of(target: Path, receipts: str, keep: Collection[Path] = ()) -> None:
    """Removes what earlier saves of one checkpoint left behind: those of writers who are gone, and this process's.

    Args:
        target: The checkpoint that is saved next.
        receipts: Name of the directory inside of a temporary one that its writer signed.
        keep: Those that stay.
    """
    for path in all_beside(target, "tmp"):
        if path not in keep:
            verdict = _judge(path / receipts / OWNER_NAME)
            _remove(path, verdict._replace(gone=verdict.gone or verdict.own))


class _Verdict(NamedTuple):
    """Of the process that left a mark: it has ended, it is this one, or why that cannot be known (to warn of)."""

    gone: bool = False
    own: bool = False
    doubt: str = ""


def _remove(path: Path, verdict: _Verdict) -> None:
    if verdict.gone:
        remove(path)
    elif verdict.doubt:
        warnings.warn(
            f"{path} may be what a killed save left behind, or a save under way: {verdict.doubt}. It is kept; remove "
            "it when no job saves into this folder",
            stacklevel=4,
        )


def _judge(mark: Path) -> _Verdict:
    try:
        owner = json.loads(mark.read_text())
        pid, same_host = int(owner["pid"]), owner["host"] == socket.gethostname()
        started, boot, namespace = str(owner["started"]), owner.get("boot"), owner.get("pid_namespace")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Verdict()  # not signed yet, or none of ours
    here = _this_process()
    if not same_host:
        return _Verdict()
    if owner == here:
        return _Verdict(own=True)
    if not (boot and namespace):
        return _Verdict(doubt="its mark does not say in which boot and PID namespace its process ran")
    if boot != here["boot"]:
        return _Verdict(doubt="its process ran in another boot, or on another machine of this name")
    if namespace != here["pid_namespace"]:
        return _Verdict(doubt="its process ran in another container (PID namespace), whose processes are not seen here")
    now = _started(pid)
    if now == _UNKNOWN or started == _UNKNOWN:
        return _Verdict(doubt=f"process {pid} cannot be looked at")
    return _Verdict(gone=now != started)


def _this_process() -> dict[str, int | str]:
    """Who this process is among all that ever ran on hosts of this name; "" for what cannot be known."""
    pid = os.getpid()
    boot = namespace = ""
    try:
        boot = _BOOT_ID.read_text().strip()
        if int(os.readlink("/proc/self")) == pid:  # else /proc shows the processes of another namespace
            namespace = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        pass
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "pid_namespace": namespace,
        "pid": pid,
        "started": _started(pid) or _UNKNOWN,
    }


def _started(pid: int) -> str | None:
    """When a process was started, for numbers are used again: ticks since the boot; None if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        pass
    try:  # another user's may be hidden
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):
        pass
    return _UNKNOWN
