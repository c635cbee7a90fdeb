"""What crashed saves left behind in a folder of checkpoints.

A temporary directory says who writes it, and so does a mark, a file that is there for a moment only. They go when
another save begins in the same folder and that process is gone from this host. What a process of another host left
behind cannot be told from what it is still writing, and stays.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from zero_strategy.checkpoint.replace import remove

OWNER_NAME = "owner.json"
MARK = ".seen"


def sign(directory: Path) -> None:
    """Leaves this process's name in a directory."""
    leave_mark(directory / OWNER_NAME)


def leave_mark(path: Path) -> None:
    """Writes a file that says that this process wrote it."""
    path.write_text(json.dumps({"host": socket.gethostname(), **_process(os.getpid())}))


def mark_name(token: str, rank: int) -> str:
    """A rank's mark in a folder of checkpoints, of a name that `remove_leftovers` knows."""
    return f"{MARK}.{token}.{rank}"


def remove_leftovers(parent: Path, receipts: str) -> None:
    """Removes what writers who are gone left behind.

    Args:
        parent: A folder of checkpoints.
        receipts: Name of the directory inside of a temporary one that its writer signed.
    """
    for path in parent.glob(".*.*.tmp"):
        if _is_gone(path / receipts / OWNER_NAME):
            remove(path)
    for path in parent.glob(f"{MARK}.*.*"):
        if _is_gone(path):
            remove(path)


def _is_gone(mark: Path) -> bool:
    """Whether the process that left a mark ran on this host and has ended."""
    try:
        owner = json.loads(mark.read_text())
        started = {"pid": owner["pid"], "started": owner["started"]}
        return bool(owner["host"] == socket.gethostname() and _process(owner["pid"]) != started)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not signed yet, or none of ours


def _process(pid: int) -> dict[str, int | str]:
    """A process's number and the moment when it was started, for numbers are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        return {"pid": pid, "started": status.rsplit(")", 1)[1].split()[19]}
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return {"pid": pid, "started": "never"}
    except OSError:
        pass
    return {"pid": pid, "started": "unknown"}
