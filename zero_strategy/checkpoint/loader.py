"""The loader: what an engine takes from a checkpoint, and in what order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_strategy.checkpoint import load as loading
from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.preemption import StepWatch
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.checkpoint.save import Saver

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

Source = str | os.PathLike[str] | StateReader
"""A checkpoint, a folder with `latest`, or what reads one."""


class Loader:
    """Loads checkpoints into one engine; all ranks call its methods.

    Args:
        engine: The engine.
        saver: Its saves, which end before anything is loaded.
        steps: Its counters.
        opened: Opens a checkpoint of any format at a path; the second argument is `checkpoint.verify`.
        publish: Called when weights have changed: other parts of the model may have copies.
    """

    def __init__(
        self,
        engine: TrainState,
        saver: Saver,
        steps: StepWatch,
        opened: Callable[[str | os.PathLike[str], bool], StateReader],
        publish: Callable[[], None],
    ) -> None:
        self._engine, self._saver, self._steps, self._opened, self._publish = engine, saver, steps, opened, publish

    def load(
        self,
        source: Source,
        *,
        strict: bool = True,
        optimizers: bool = True,
        weights: Callable[[StateReader], None] | None = None,
    ) -> StateReader:
        """Load all; see `ZeroEngine.load`."""
        engine = self._engine
        # First: gradients that wait for a step, and a step that will be skipped, belong to the weights of before.
        engine.model.reducer.drop()
        for sharded in engine.optimizers:
            sharded.skip_next = False
        if weights is None:
            reader = self.weights(source, strict=strict)
        else:
            weights(reader := self._reader(source))
        self._publish()
        if optimizers and engine.optimizers and reader.has_manifest:
            self.optimizers(reader)
            self._steps.load_counters(reader.manifest.counters)
            self.random_state(reader)  # last: what is loaded before may draw numbers
        return reader

    def weights(self, source: Source, *, strict: bool = True) -> StateReader:
        """Load weights and buffers, without telling other parts of the model; see `ZeroEngine.load_weights`."""
        self._engine.model.moved.check("loading a checkpoint")
        if self._engine.average is not None:
            self._engine.average.check_not_shown("loading a checkpoint")
        self._saver.wait()  # it may read what is about to change, or write what is about to be read
        reader = self._reader(source)
        with self._engine.mesh.observed.span("load"):
            loading.load_weights(self._engine, reader, strict=strict)
        return reader

    def optimizers(self, source: Source) -> None:
        """Load optimizer state, master weights and the loss scale, without telling other parts of the model."""
        reader = self._reader(source)
        self._engine.model.moved.check("loading a checkpoint")
        with self._engine.mesh.observed.span("load"):
            loading.load_optimizers(self._engine, reader)

    def random_state(self, reader: StateReader) -> None:
        """Give this rank its random state back, where the config says so; see `checkpoint.random_state`."""
        if self._engine.config.config.checkpoint.random_state:
            world = self._engine.mesh.world_group
            random_state.load(reader, world.rank, world.world_size)

    def _reader(self, source: Source) -> StateReader:
        if isinstance(source, StateReader):
            return source
        self._engine.mesh.world_group.barrier.wait_for_all("loading a checkpoint")
        verify = self._engine.config.config.checkpoint.verify
        return loading.open_together(self._engine, lambda: self._opened(source, verify))
