"""What may fail on one rank alone, so that all ranks learn of it instead of waiting for the one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zero_strategy.distributed.collectives import Communicator

T = TypeVar("T")


def together(control: Communicator, action: Callable[[], T]) -> T:
    """Run `action` on this rank; if it fails on any rank, raise on all. A collective.

    Args:
        control: The ranks.
        action: What this rank does; without collectives.

    Raises:
        Exception: What `action` raised here.
        RuntimeError: What it raised on other ranks.
    """
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(action())
    except Exception as caught:
        error = caught
    reports = control.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(reports) if text is not None}
    if failed:
        raise RuntimeError(f"failed on other rank(s): {failed}")
    return found[0]
