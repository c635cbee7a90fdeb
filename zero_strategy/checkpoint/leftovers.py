"""What crashed saves left behind in a folder of checkpoints.

A temporary directory says who writes it. It goes when another save begins in the same folder and that process is gone
from this host. What a process of another host left behind cannot be told from what it is still writing, and stays.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from zero_strategy.checkpoint.replace import remove

OWNER_NAME = "owner.json"


def sign(directory: Path) -> None:
    """Leave this process's name in a directory."""
    (directory / OWNER_NAME).write_text(json.dumps({"host": socket.gethostname(), **_process(os.getpid())}))


def remove_leftovers(parent: Path, receipts: str) -> None:
    """Remove temporary directories whose writer is gone; `receipts` is the name of the directory that it signed."""
    for path in parent.glob(".*.*.tmp"):
        try:
            owner = json.loads((path / receipts / OWNER_NAME).read_text())
            gone = owner["host"] == socket.gethostname() and _process(owner["pid"]) != {
                "pid": owner["pid"],
                "started": owner["started"],
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not signed yet, or none of ours
        if gone:
            remove(path)


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
