"""Which of the checkpoints in a folder may go, and their removal.

A checkpoint is removed in two steps: it gets a name with a dot, which is no checkpoint any more, then its files go. A
crash between the two leaves no half checkpoint, and what it left goes at the next removal.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.replace import beside, remove, sync
from zero_strategy.runtime.regular_files import read_text

_SUFFIX = "removed"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder.

    Attributes:
        path: Its directory.
        step: Optimizer steps taken, if it says so.
        saved_at: When it was completed, in nanoseconds; only the order matters.
        complete: Whether its manifest is valid and all its files are there.
        is_latest: Whether `latest` names it.
        bytes: Its size.
    """

    path: Path
    step: int | None
    saved_at: int
    complete: bool = True
    is_latest: bool = False
    bytes: int = 0


def which_to_remove(checkpoints: Sequence[Found], keep_last: int, keep_every: int = 0) -> list[Found]:
    """Chooses, without looking at any file.

    Only complete checkpoints count, and only they are chosen. The newest complete one and the one that `latest` names
    always stay.

    Args:
        checkpoints: All of a folder.
        keep_last: How many of the newest stay; 0 keeps all.
        keep_every: Those whose step is a multiple of this stay, too; 0 keeps none for its step.

    Returns:
        Those that may go, oldest first.

    Raises:
        ValueError: If a number is negative.
    """
    if keep_last < 0 or keep_every < 0:
        raise ValueError(f"keep_last={keep_last} and keep_every={keep_every} must not be negative")
    if keep_last == 0:
        return []
    complete = sorted((found for found in checkpoints if found.complete), key=_age)
    return [found for found in complete[:-keep_last] if not found.is_latest and not _is_kept(found, keep_every)]


def find_checkpoints(directory: str | os.PathLike[str]) -> list[Found]:
    """All checkpoints of ours in a folder, oldest first, those that are not complete included.

    What has no manifest is none of ours, or is still being written, and is left out.
    """
    parent = Path(directory)
    latest = _latest(parent)
    found = []
    for path in parent.iterdir():
        if path.name.startswith(".") or path.is_symlink() or not (path / MANIFEST_NAME).is_file():
            continue
        saved_at = (path / MANIFEST_NAME).stat().st_mtime_ns
        try:
            manifest = Manifest.load(path)
        except (ValueError, OSError):
            found.append(Found(path, None, saved_at, complete=False, is_latest=path.name == latest))
            continue
        step = manifest.counters.get("global_steps")
        size = sum(manifest.files.values())
        found.append(Found(path, step if type(step) is int else None, saved_at, True, path.name == latest, size))
    return sorted(found, key=_age)


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Removes checkpoints, and what earlier removals in their folders left behind in a crash.

    Raises:
        OSError: If one cannot be renamed; those before it are gone, it and those after it are whole.
    """
    parents = set()
    for path in paths:
        aside = beside(path, uuid.uuid4().hex[:12], _SUFFIX)
        os.rename(path, aside)
        sync(path.parent)
        remove(aside)
        parents.add(path.parent)
    for parent in parents:
        for left in parent.glob(f".*.{_SUFFIX}"):
            remove(left)


def prune(directory: str | os.PathLike[str], keep_last: int, keep_every: int = 0) -> list[Found]:
    """Removes what `which_to_remove` chooses in a folder; returns it."""
    chosen = which_to_remove(find_checkpoints(directory), keep_last, keep_every)
    remove_checkpoints(found.path for found in chosen)
    return chosen


def _age(found: Found) -> tuple[int, int, str]:
    return found.saved_at, -1 if found.step is None else found.step, found.path.name


def _is_kept(found: Found, keep_every: int) -> bool:
    return keep_every > 0 and found.step is not None and found.step % keep_every == 0


def _latest(parent: Path) -> str | None:
    try:
        return read_text(parent / LATEST_NAME).strip()
    except (OSError, ValueError):
        return None
