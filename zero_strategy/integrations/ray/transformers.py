"""The callback of transformers' trainers that reports to Ray Train."""

from __future__ import annotations

import os
import shutil
from typing import Any

import ray.train
from transformers import TrainerCallback

from zero_strategy.integrations.ray.reports import report


class RaySaveCallback(TrainerCallback):
    """Reports each checkpoint that `ZeroTrainer` has saved to Ray Train, with the metrics that were logged.

    `save_total_limit` may remove what the trainer saved, so rank 0 copies the files once into Ray's storage path.
    Resume by `trainer.train(resume_from_checkpoint=reported_checkpoint())`.
    """

    __module__ = "zero_strategy.integrations.ray"

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Copy what was saved, and report it."""
        saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        first = ray.train.get_context().get_world_rank() == 0
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        # Ray registers a checkpoint when all workers have reported, rank 0 after it has copied.
        report(metrics, lambda path: shutil.copytree(saved, path) if first else None)
