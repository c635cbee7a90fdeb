"""The callback of Lightning's Trainer that reports to Ray Train."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.ray.notices import NoticeWatch
from zero_strategy.integrations.ray.reports import report
from zero_strategy.integrations.ray.strategies import lightning_in_use

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = import_module(lightning_in_use()).Callback


class RayReportCallback(Callback):
    """Reports the logged metrics and a checkpoint to Ray Train, at the end of each epoch or every few steps.

    It also reports after the step that follows Ray's notice that a node is about to be taken away. Every worker writes
    its share of the checkpoint, straight into the storage path of Ray's run; see `report`.

    Args:
        every_n_epochs: Epochs from one report to the next; 0 for none at their ends.
        every_n_train_steps: Optimizer steps from one report to the next, besides; a run resumes inside of its epoch.

    Raises:
        ValueError: If nothing would be reported, or a number is negative.
    """

    __module__ = "zero_strategy.integrations.ray"

    def __init__(self, every_n_epochs: int = 1, every_n_train_steps: int = 0) -> None:
        super().__init__()
        if min(every_n_epochs, every_n_train_steps) < 0 or not (every_n_epochs or every_n_train_steps):
            raise ValueError(
                f"every_n_epochs={every_n_epochs} and every_n_train_steps={every_n_train_steps}: one of them has to "
                "be more than 0, and none may be less"
            )
        self._epochs, self._steps = every_n_epochs, every_n_train_steps
        self._reported = -1
        self._notices: NoticeWatch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to look for notices."""
        engine = getattr(trainer.strategy, "engine", None)
        # In the main thread, where Ray runs no workers, the steps' flags are those of signals.
        if isinstance(engine, ZeroEngine) and threading.current_thread() is not threading.main_thread():
            self._notices = NoticeWatch(engine.steps)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Pass a notice on, with this batch's reduction of gradients."""
        if self._notices is not None:
            self._notices.look()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report, if it is the step's turn or a notice has come."""
        step, noticed = trainer.global_step, self._notices is not None and self._notices.due()
        due = noticed or (self._steps and step and step % self._steps == 0)
        # With accumulation several batches end at one step.
        if due and step != self._reported and not (trainer.is_last_batch and self._ends_with_report(trainer)):
            self._report(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Look for notices no longer."""
        if self._notices is not None:
            self._notices.forget()
            self._notices = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report, if it is the epoch's turn."""
        if self._ends_with_report(trainer):
            self._report(trainer)

    def _ends_with_report(self, trainer: Any) -> bool:
        return bool(self._epochs) and (trainer.current_epoch + 1) % self._epochs == 0

    def _report(self, trainer: Any) -> None:
        self._reported = trainer.global_step
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        report({**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}, trainer.save_checkpoint)
