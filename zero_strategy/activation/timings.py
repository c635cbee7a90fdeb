"""How long checkpoints take: their forwards, and their backwards, recomputation included."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from zero_strategy.runtime.reporting import report

_logger = logging.getLogger(__name__)


@dataclass
class CheckpointTimings:
    """Seconds since the last `reset`.

    Attributes:
        forwards: Checkpoints whose forward was measured.
        forward_seconds: In all of them together.
        backwards: Checkpoints whose backward was measured.
        backward_seconds: In all of them together, from the beginning of the recomputation to the gradients of the
            checkpoint's inputs, the next checkpoint's backward, or the end of all, whichever comes first.
    """

    forwards: int = 0
    forward_seconds: float = 0.0
    backwards: int = 0
    backward_seconds: float = 0.0

    def reset(self) -> None:
        """Start again from zero."""
        self.forwards = self.backwards = 0
        self.forward_seconds = self.backward_seconds = 0.0

    def as_metrics(self) -> dict[str, float]:
        """Totals and means by name, for a logger."""
        return {
            "checkpoint/forwards": self.forwards,
            "checkpoint/forward_seconds": self.forward_seconds,
            "checkpoint/backwards": self.backwards,
            "checkpoint/backward_seconds": self.backward_seconds,
        }

    def add_forward(self, seconds: float) -> None:
        """Count one, and log it."""
        self.forwards += 1
        self.forward_seconds += seconds
        report(_logger, "checkpoint %d: forward %.3f ms", self.forwards, 1e3 * seconds)

    def add_backward(self, seconds: float) -> None:
        """Count one, and log it."""
        self.backwards += 1
        self.backward_seconds += seconds
        report(_logger, "checkpoint backward %d: %.3f ms", self.backwards, 1e3 * seconds)


@dataclass
class InBackward:
    """Whose backward is under way, among the checkpoints of one `Checkpointer`.

    Attributes:
        watch: Its stopwatch; None between backwards.
    """

    watch: Stopwatch | None = None


class Stopwatch:
    """Marks the ends of a checkpoint's forward and backward, and waits for the device at each of them.

    So work that is under way counts where it belongs. Checkpoints inside of others have none.

    Args:
        timings: Where measured times go; None: nothing is measured.
        shared: With the other checkpoints, since the beginning of one's backward is the end of another's.
    """

    def __init__(self, timings: CheckpointTimings | None, shared: InBackward) -> None:
        self._timings, self._shared = timings, shared
        self._began = 0.0

    def forward_begins(self) -> None:
        """Before the function is called."""
        self._began = self._now()

    def forward_ends(self) -> None:
        """After it has returned."""
        end = self._now()
        if self._timings is not None:
            self._timings.add_forward(end - self._began)

    def backward_begins(self) -> None:
        """Before what is kept is fetched and the function is called again."""
        if self._shared.watch is not None:
            self._shared.watch.backward_ends()
        self._shared.watch = self
        self._began = self._now()

    def backward_ends(self) -> None:
        """After the gradients of the inputs are there; once for each beginning."""
        if self._shared.watch is not self:
            return
        self._shared.watch = None
        end = self._now()
        if self._timings is not None:
            self._timings.add_backward(end - self._began)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()
