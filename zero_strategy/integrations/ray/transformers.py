"""The callback of transformers' trainers that reports to Ray Train."""

from __future__ import annotations

import os
import shutil
from typing import Any

import ray.train
from transformers import TrainerCallback

from zero_strategy.integrations.engine_of import engine_of
from zero_strategy.integrations.ray.notices import NoticeWatch
from zero_strategy.integrations.ray.reports import report


class RaySaveCallback(TrainerCallback):
    """Reports each checkpoint that `ZeroTrainer` has saved to Ray Train, with the metrics that were logged.

    Ray's notice that a node is about to be taken away makes the trainer save after the step that follows.
    `save_total_limit` may remove what the trainer saved, so rank 0 copies the files once into Ray's storage path.
    Resume by `trainer.train(resume_from_checkpoint=reported_checkpoint())`.
    """

    __module__ = "zero_strategy.integrations.ray"

    def __init__(self) -> None:
        self._notices: NoticeWatch | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Pass a notice on, with this step's reduction of gradients."""
        if self._notices is None:
            self._notices = NoticeWatch(engine_of(keywords["model"]).steps)
        self._notices.look()

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Let the trainer save, if a notice has come."""
        if self._notices is not None and self._notices.due():
            control.should_save = True

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Look for notices no longer; a second run may have another engine."""
        if self._notices is not None:
            self._notices.forget()
            self._notices = None

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Copy what was saved, and report it."""
        saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        first = ray.train.get_context().get_world_rank() == 0
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        # Ray registers a checkpoint when all workers have reported, rank 0 after it has copied.
        report(metrics, lambda path: shutil.copytree(saved, path) if first else None)
