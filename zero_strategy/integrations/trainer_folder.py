"""The folder of the transformers Trainer's checkpoints, after runs that ended at any moment.

The Trainer writes its own files into a checkpoint that is already there, and removes the oldest by their modification
times. A kill in the first leaves a checkpoint that cannot be resumed, a kill in the second one that looks the newest.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from zero_strategy.checkpoint.manifest import MANIFEST_NAME

_STATE = "trainer_state.json"
"""The last that the Trainer writes into a checkpoint."""
_TICK = 1_000_000
"""Nanoseconds; any file system can tell times that differ by this, or has none at all."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints of the Trainer, whole or not, in the order of their steps."""
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    numbered = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]))


def last_resumable(folder: Path) -> Path | None:
    """The last checkpoint that has all that the Trainer resumes from; None if it is the last of all, or there is none.

    A warning names those after it.
    """
    found = checkpoints_in(folder)
    whole = [path for path in found if (path / _STATE).is_file()]
    if not whole or whole[-1] == found[-1]:
        return None
    skipped = [path.name for path in found[found.index(whole[-1]) + 1 :]]
    warnings.warn(
        f"{folder}: a run was ended while it wrote {', '.join(skipped)}; resuming from {whole[-1].name}", stacklevel=3
    )
    return whole[-1]


def date_by_step(folder: Path) -> None:
    """Let modification times grow with steps, as the Trainer takes for granted when it removes the oldest."""
    found = checkpoints_in(folder)
    if not found or not (found[-1] / MANIFEST_NAME).is_file():
        return
    bound = found[-1].stat().st_mtime_ns
    for path in reversed(found[:-1]):
        status = path.stat()
        if status.st_mtime_ns >= bound:
            os.utime(path, ns=(status.st_atime_ns, bound - _TICK))
        bound = min(bound - _TICK, status.st_mtime_ns)
