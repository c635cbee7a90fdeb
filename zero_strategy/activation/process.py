"""What the functions of DeepSpeed's API share in a process: its options and its tracker of random states.

The only thing of this package that is global, since `configure`, `checkpoint` and `get_cuda_rng_tracker` of that API
are. Everything behind them works without it: `Checkpointer`, `CudaRNGStatesTracker`.
"""

from __future__ import annotations

from zero_strategy.activation.checkpointer import Checkpointer
from zero_strategy.activation.model_parallel import ModelParallel
from zero_strategy.activation.rng import CudaRNGStatesTracker
from zero_strategy.activation.settings import CheckpointSettings


class ProcessState:
    """One process's.

    Attributes:
        tracker: The tracker, once somebody asked for it.
        configured: Whether options were set.
        by_script: Whether the script did so itself, which an engine's config then does not change.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Back to the beginning."""
        self.tracker: CudaRNGStatesTracker | None = None
        self.configured = self.by_script = False
        self._checkpointer: Checkpointer | None = None
        self._place: ModelParallel | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The one that `checkpoint` uses; without options before `configure`."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(tracker=lambda: self.tracker)
        return self._checkpointer

    @property
    def place(self) -> ModelParallel:
        """This process in its model-parallel group."""
        return ModelParallel.of(None) if self._place is None else self._place

    def configure(self, settings: CheckpointSettings, place: ModelParallel | None, *, by_script: bool) -> None:
        """Take new options; what earlier ones keep for a graph stays with that graph."""
        self._checkpointer = Checkpointer(settings, place, lambda: self.tracker)
        self._place, self.configured, self.by_script = place, True, by_script


PROCESS = ProcessState()
