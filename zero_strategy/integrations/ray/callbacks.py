"""The callback of Lightning's Trainer that reports to Ray Train."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_strategy.integrations.ray.reports import report
from zero_strategy.integrations.ray.strategies import lightning_in_use

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = import_module(lightning_in_use()).Callback


class RayReportCallback(Callback):
    """Reports the logged metrics and a checkpoint to Ray Train, at the end of each epoch or every few steps.

    Every worker writes its share of the checkpoint, straight into the storage path of Ray's run; see `report`.

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

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report, if it is the step's turn."""
        step = trainer.global_step
        due = self._steps and step and step % self._steps == 0 and step != self._reported
        if due and not (trainer.is_last_batch and self._ends_with_report(trainer)):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report, if it is the epoch's turn."""
        if self._ends_with_report(trainer):
            self._report(trainer)

    def _ends_with_report(self, trainer: Any) -> bool:
        return bool(self._epochs) and (trainer.current_epoch + 1) % self._epochs == 0

    def _report(self, trainer: Any) -> None:
        # With accumulation several batches end at one step.
        self._reported = trainer.global_step
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        report({**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}, trainer.save_checkpoint)
