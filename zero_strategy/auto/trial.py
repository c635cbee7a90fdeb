"""Measured steps of a training that has begun: among settings that a running engine can change, the quickest stays.

Stage 3 can gather further ahead, and keep what it has gathered until backward; neither changes a bit, nor what lies
between steps. Each choice that fits is tried for some steps, which train like any others. Then ranks exchange their
times, those of the slowest rank count, and all take the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from zero_strategy.config import ZeroConfig
from zero_strategy.runtime.terminal import report, table

MEASURED = "measured: auto.enabled"
"""Origin of settings that a trial has found."""
WARM, STEPS = 1, 2
"""Steps of a choice before those that count, as the first ones gather otherwise; and those that count."""
MOST = 3
"""Choices that are tried: nine steps."""
_GAIN = 0.02
"""Part of the time by which another choice has to be quicker than the first one."""

_logger = logging.getLogger(__name__)


class Gathers(Protocol):
    """Attributes by which stage 3 gathers; see `Unsharder`."""

    prefetch: int
    reshard_after_forward: bool


class Trial:
    """A trial of some choices, one after the other.

    Args:
        gathers: What is changed.
        choices: Settings of each, by name; the first one is in effect.
        config: Gets the settings that are taken.
        exchange: Gives the objects of all ranks; a collective.
        rank: This one; rank 0 tells.
        clock: Seconds.
    """

    def __init__(
        self,
        gathers: Gathers,
        choices: Sequence[Mapping[str, Any]],
        config: ZeroConfig,
        exchange: Callable[[Any], list[Any]],
        rank: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gathers, self._choices, self._config = gathers, list(choices)[:MOST], config
        self._exchange, self._rank, self._clock = exchange, rank, clock
        self._steps, self._last = 0, 0.0
        self._times: list[list[float]] = [[] for _ in self._choices]

    @property
    def over(self) -> bool:
        """True once a choice is taken."""
        return self._steps >= (WARM + STEPS) * len(self._choices)

    def step_over(self) -> None:
        """A step has ended, on all ranks alike. A collective at the end of the trial."""
        now = self._clock()
        number, place = divmod(self._steps, WARM + STEPS)
        if place >= WARM:
            self._times[number].append(now - self._last)
        self._steps += 1
        if self.over:
            self._take()
        elif self._steps % (WARM + STEPS) == 0:
            self._set(self._choices[self._steps // (WARM + STEPS)])
        self._last = self._clock()

    def _take(self) -> None:
        everyone = self._exchange([min(times) for times in self._times])
        slowest = [max(each[number] for each in everyone) for number in range(len(self._choices))]
        best = min(range(len(slowest)), key=lambda number: slowest[number])
        if slowest[best] > (1 - _GAIN) * slowest[0]:
            best = 0
        self._set(self._choices[best])
        for name, value in self._choices[best].items():
            if getattr(self._config, name) != value:
                self._config.record(name, value, MEASURED)
        if self._rank == 0:
            rows = [
                (", ".join(f"{name}: {str(value).lower()}" for name, value in choice.items()), f"{seconds:.3g}",
                 "taken" if number == best else f"{seconds / slowest[best] - 1:+.0%}")
                for number, (choice, seconds) in enumerate(zip(self._choices, slowest, strict=True))
            ]  # fmt: skip
            report(_logger, "measured in %d steps (auto.enabled):\n%s", self._steps, table(rows, ("settings", "s", "")))

    def _set(self, choice: Mapping[str, Any]) -> None:
        for name, value in choice.items():
            setattr(self._gathers, name, value)


def trial_for(
    config: ZeroConfig, gathers: Gathers | None, exchange: Callable[[Any], list[Any]], rank: int
) -> Trial | None:  # fmt: skip
    """The trial of a training whose settings were chosen; None: there is nothing to try."""
    choices = [] if config.chosen is None else config.chosen["tried"]
    return None if gathers is None or len(choices) < 2 else Trial(gathers, choices, config, exchange, rank)
