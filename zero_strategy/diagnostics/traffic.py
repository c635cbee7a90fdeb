"""What moves bytes during a step: how many, and in how many seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Moved(NamedTuple):
    """One movement that is over.

    Attributes:
        kind: Such as "all_gather", "disk_read", "copy".
        nbytes: Sent, read, written or copied by this rank.
        begin, end: Seconds of the process's clock.
    """

    kind: str
    nbytes: int
    begin: float
    end: float


class Flow(NamedTuple):
    """All movements of one kind in a step.

    Attributes:
        calls: Their number.
        nbytes: Their bytes.
        seconds: In which at least one of them was under way.
    """

    calls: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float | None:
        """While something moved; None if that took no time."""
        return self.nbytes / self.seconds if self.seconds > 0 else None


MOST_MOVED = 4096
"""Movements that are kept one by one; a long evaluation has any number of them."""


class Traffic:
    """Collects movements; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._moved: list[Moved] = []
        self._folded: dict[str, Flow] = {}
        self._lock = threading.Lock()

    def add(self, moved: Moved) -> None:
        """Note one that is over."""
        with self._lock:
            self._moved.append(moved)
            if len(self._moved) >= MOST_MOVED:
                self._fold()

    def take(self) -> dict[str, Flow]:
        """By kind, what has been noted since this was called last."""
        with self._lock:
            self._fold()
            found, self._folded = self._folded, {}
        return found

    def _fold(self) -> None:
        for kind, flow in flows(self._moved).items():
            before = self._folded.get(kind, Flow(0, 0, 0.0))
            added = Flow(before.calls + flow.calls, before.nbytes + flow.nbytes, before.seconds + flow.seconds)
            self._folded[kind] = added
        self._moved = []


def flows(moved: Iterable[Moved]) -> dict[str, Flow]:
    """By kind, in alphabetical order."""
    by_kind: dict[str, list[Moved]] = {}
    for one in moved:
        by_kind.setdefault(one.kind, []).append(one)
    return {
        kind: Flow(len(found), sum(one.nbytes for one in found), _covered(found))
        for kind, found in sorted(by_kind.items())
    }


def _covered(moved: list[Moved]) -> float:
    """Seconds that the union of their intervals takes."""
    covered, until = 0.0, float("-inf")
    for one in sorted(moved, key=lambda one: one.begin):
        covered += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    return covered
