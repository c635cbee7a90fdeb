"""Counts of a script's epochs, micro-batches and steps, and its samples per second: `engine.tput_timer`."""

from __future__ import annotations

import time
import weakref
from typing import Any


class ThroughputTimer:
    """Counts that scripts read of DeepSpeed's timer; nothing is printed, and nobody waits for a GPU.

    Args:
        engine: Has `train_batch_size()`.

    Attributes:
        epoch_count: Calls of `update_epoch_count`.
        micro_step_count: Micro-batches of this epoch.
        global_step_count: Steps, skipped ones included.
        total_elapsed_time: Seconds that are counted: between the ends of steps, from the end of the second step on.
        start_step: Number of steps that are not counted.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.start_step = 2
        self._last: float | None = None

    def update_epoch_count(self) -> None:
        """Note that an epoch has ended; micro-batches are counted anew."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def stepped(self) -> None:
        """Note the end of a step."""
        self.global_step_count += 1
        now = time.perf_counter()
        if self._last is not None and self.global_step_count > self.start_step:
            self.total_elapsed_time += now - self._last
        self._last = now

    def avg_samples_per_sec(self) -> float:
        """Samples per second over all ranks; -inf, as in DeepSpeed, before a step has been counted.

        Raises:
            ValueError: If the config says no batch size.
        """
        engine, counted = self._engine(), self.global_step_count - self.start_step
        if engine is None or counted < 1 or self.total_elapsed_time <= 0:
            return float("-inf")
        samples: int = engine.train_batch_size()
        return samples * counted / self.total_elapsed_time
