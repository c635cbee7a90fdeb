"""The time of one step, divided without gaps: at every moment the thread that trains does exactly one thing.

    phase    | data_wait |     compute                        |  optimizer            |
    spans                    [all_gather]   [reduce_scatter]      [disk]
    parts     data_wait  compute  all_gather  compute ...        optimizer  disk ...

A part is what the innermost span says, else the phase. So the parts of a step add up to it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch

Part = Literal[
    "compute",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "control",
    "pipeline_bubble",
    "copies",
    "disk",
    "optimizer",
    "data_wait",
    "evaluation",
    "checkpoint",
    "diagnostics",
    "other",
]
"""What a step consists of: `compute`: forward and backward; waits for collectives by kind; `pipeline_bubble`: for other
stages; `copies`: between tiers of memory; `disk`: for files; `data_wait`: from the end of a backward or a step to the
next forward; `diagnostics`: what measuring took at the end of the step before."""

PARTS: tuple[Part, ...] = get_args(Part)
MOST_SECTIONS = 4096
"""Of a step, before those that are over are added up: a long evaluation has any number of them."""
FORWARDS = ("compute", "evaluation")
"""Phases that begin with a forward."""


class Clock(Protocol):
    """Takes the time, and says later what it was."""

    def now(self) -> Any:
        """A moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; may wait for the second."""


class HostClock:
    """The process's own."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin


class DeviceClock:
    """Moments in the current stream of a CUDA device, so that what the host does meanwhile does not count."""

    def now(self) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between them, once the device has come to the second."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass
class _Section:
    part: Part | None
    """None: not decided yet."""
    begin: Any


class StepClock:
    """Divides the time of one thread into parts.

    Args:
        clock: What takes the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sections: list[_Section] = []
        self._spans: list[Part] = []
        self._phase: Part | None = "other"
        self._undecided: list[_Section] = []
        self._folded: dict[str, float] = {}

    @property
    def running(self) -> bool:
        """Whether a step is being measured."""
        return bool(self._sections)

    def start(self, phase: Part) -> None:
        """A step begins now."""
        self._sections, self._undecided, self._folded, self._phase = [], [], {}, phase
        self._turn()

    def turn(self, phase: Part) -> None:
        """Another phase begins. A gap after a backward that ends with a forward was a wait for data.

        A step may begin before that forward: it runs in a closure then.
        """
        if phase != "optimizer":
            for section in self._undecided:
                section.part = "data_wait" if phase in FORWARDS else "other"
            self._undecided = []
        if phase != self._phase:
            self._phase = phase
            self._turn()

    def turn_later(self) -> None:
        """A backward is over; what follows is known when the next phase begins."""
        if self._phase is not None:
            self._phase = None
            self._turn()

    def enter(self, part: Part) -> None:
        """A span begins."""
        self._spans.append(part)
        self._turn()

    def leave(self) -> None:
        """The innermost span is over."""
        if self._spans:
            self._spans.pop()
            self._turn()

    def end(self) -> tuple[float, dict[str, float]]:
        """The step ends now: its seconds, and those of its parts."""
        self.turn("other")  # decides what is undecided
        self._fold(self._clock.now())
        self._sections = []
        return sum(self._folded.values()), self._folded

    def _fold(self, end: Any) -> None:
        """Add up all sections, the last one until `end`."""
        moments = [*(section.begin for section in self._sections), end]
        for section, begin, stop in zip(self._sections, moments, moments[1:]):
            assert section.part is not None
            self._folded[section.part] = self._folded.get(section.part, 0.0) + self._clock.seconds(begin, stop)

    def _turn(self) -> None:
        part = self._spans[-1] if self._spans else self._phase
        section = _Section(part, self._clock.now())
        if len(self._sections) >= MOST_SECTIONS and not self._undecided:
            self._fold(section.begin)
            self._sections = []
        if part is None:
            self._undecided.append(section)
        self._sections.append(section)
