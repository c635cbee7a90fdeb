"""Every interval of a step, for a trace of it."""

from __future__ import annotations

import time

from zero_strategy.diagnostics.run_files import Interval
from zero_strategy.diagnostics.step_clock import FORWARDS

PHASES, TRAINING, PIPELINE = "phase", "training", "pipeline"
"""Rows in which intervals do not overlap, or lie within one another."""
MOST = 50_000
"""Intervals of a step; what comes later is left out."""


class Intervals:
    """Collects them while a step is traced; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._found: list[Interval] | None = None
        self._phases: list[tuple[str, float]] = []
        self._shift = time.time() - time.perf_counter()

    def start(self, traced: bool) -> None:
        """A step begins, which is traced or not."""
        self._found = [] if traced else None
        self._phases = []

    def add(self, name: str, row: str, begin: float, end: float, detail: str = "") -> None:
        """Note one; times are those of `time.perf_counter`."""
        if (found := self._found) is not None and len(found) < MOST:
            found.append(Interval(name, row, begin + self._shift, end + self._shift, detail))

    def turn(self, phase: str) -> None:
        """A phase begins; an empty one gets its name from what follows."""
        if self._found is not None:
            if phase not in ("", "optimizer"):  # as in `StepClock.turn`
                name = "data_wait" if phase in FORWARDS else "other"
                self._phases = [(known or name, begin) for known, begin in self._phases]
            if not self._phases or self._phases[-1][0] != phase:
                self._phases.append((phase, time.perf_counter()))

    def take(self) -> list[Interval]:
        """The step is over: all of them, by time; none if it was not traced."""
        if self._found is None:
            return []
        self.turn("other")
        end = time.perf_counter()
        starts = [begin for _, begin in self._phases]
        for (name, begin), stop in zip(self._phases, [*starts[1:], end]):
            self.add(name, PHASES, begin, stop)
        found, self._found = self._found, None
        return sorted(found, key=lambda one: (one.begin, -one.end))
