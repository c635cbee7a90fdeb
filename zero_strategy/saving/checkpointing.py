"""An engine as the forms of saving see it that are made of its `save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

from zero_strategy.checkpoint import StateReader
from zero_strategy.saving.job import PendingSave
from zero_strategy.saving.saver import Saver
from zero_strategy.saving.step_watch import StepWatch
from zero_strategy.train_state import TrainState


class CheckpointingEngine(TrainState, Protocol):
    """A training with its saver and its step counters; see `ZeroEngine`."""

    saver: Saver
    steps: StepWatch

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        user: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        own_files: Mapping[str, bytes] | None = None,
        optimizers: bool = True,
        update_latest: bool = True,
        asynchronous: bool = False,
        weights_dtype: torch.dtype | None = None,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave: ...

    def load(
        self, directory: str | os.PathLike[str], *, strict: bool = True, optimizers: bool = True
    ) -> StateReader: ...
