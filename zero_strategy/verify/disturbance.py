"""The size of differences that re-ordered summation explains, measured by disturbed reference runs.

Rounding cannot be bounded from batches of unknown structure. So two more plain runs train in which every weight and
every gradient is off by one unit in its last place: how far they go astray is what another order of sums explains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_strategy.activation.rng import kept_random_state
from zero_strategy.verify.reference_run import ReferenceRun, StepRecord

JITTERS = (1, 2)
"""Seeds of the disturbed runs; what re-ordered summation explains is the larger of what they show."""


FEW = 16
"""Elements from which on the largest error among them tells how large errors are. One element's error may happen to be
next to nothing in both disturbed runs, so that of fewer elements counts FEW / elements times as much."""


class DisturbedRuns:
    """Disturbed reference runs, made when they are first asked for, and brought up to the plain one then.

    Args:
        make: Makes a reference run with a seed of its disturbance.
    """

    def __init__(self, make: Callable[[int], ReferenceRun]) -> None:
        self._make = make
        self._taken: list[StepRecord] = []
        self._runs: list[tuple[ReferenceRun, StepRecord]] = []

    def note(self, record: StepRecord) -> None:
        """The plain run has trained one more step; the others take it or skip it as that one did."""
        self._taken.append(StepRecord(taken=record.taken))

    def catch_up(self) -> None:
        """Bring the disturbed runs to the step at which the plain one is."""
        if not self._runs:
            with kept_random_state():  # the compared side goes on drawing
                self._runs = [(self._make(seed), StepRecord()) for seed in JITTERS]
        while (number := self._runs[0][0].steps_taken) < len(self._taken):
            self._runs = [(run, run.step(self._taken[number])) for run, _ in self._runs]

    def explained(self, record: StepRecord, phase: str, name: str, rank: int) -> float:
        """The largest difference of a tensor that re-ordered summation explains.

        Args:
            record: The plain run's last step.
            phase: And the others: see `StepRecord.of`.
            name: In that phase.
            rank: Whose.
        """
        self.catch_up()
        plain = record.of(phase, rank).get(name)
        if plain is None or not plain.is_floating_point() or not plain.numel():
            return 0.0
        gaps = [torch.finfo(plain.dtype).eps * plain.abs().max().double()]
        for _, disturbed in self._runs:
            if (other := disturbed.of(phase, rank).get(name)) is not None:
                gap = (other.double() - plain.double()).abs()
                gaps.append(torch.where(gap.isfinite(), gap, 0.0).max())
        measured = float(torch.stack(gaps[1:]).nan_to_num().max()) if gaps[1:] else 0.0
        return max(float(gaps[0].nan_to_num()), measured * max(1.0, FEW / plain.numel()))
