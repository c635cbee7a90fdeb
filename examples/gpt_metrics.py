"""A callback that measures loss, bits per byte and tokens per second, and writes them as JSON lines."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer


class MetricsWriter(Callback):
    """Rank 0 appends one JSON object per measured step and per validation to ``path``.

    The training loss of a step is the mean over its micro-batches and over all ranks; where only every n-th
    step is measured, the mean over the n steps.
    """

    def __init__(self, path: Path, tokens_per_micro_batch: int, every_n_steps: int = 1) -> None:
        self.path = path
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.every_n_steps = every_n_steps
        self.validated_step = -1
        self._losses: list[Tensor] = []
        self._seconds = 0.0  # of training alone
        self._tick = 0.0
        self._lr = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._losses.clear()
        self._tick = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the learning rate of this step: at the end of the batch the schedule has moved on."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of every n-th optimizer step, reduce the loss over the ranks and report it."""
        self._losses.append(outputs["micro_loss"])
        if len(self._losses) < self.every_n_steps * trainer.accumulate_grad_batches:
            return
        tokens = len(self._losses) * self.tokens_per_micro_batch * trainer.world_size
        loss = float(trainer.strategy.reduce(torch.stack(self._losses).mean(), reduce_op="mean"))
        self._losses.clear()
        now = time.perf_counter()
        elapsed, self._tick = now - self._tick, now
        self._seconds += elapsed
        bits, speed = loss / math.log(2), tokens / elapsed
        pl_module.log_dict({"loss": loss, "bpb": bits, "tokens/s": speed}, prog_bar=True, logger=False)
        self._write(trainer, loss=loss, bits_per_byte=bits, lr=self._lr, tokens_per_second=round(speed, 1))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation loss and keep its time out of the tokens per second."""
        if trainer.sanity_checking:
            return
        self.validated_step = trainer.global_step
        loss = float(trainer.callback_metrics["val_loss"])
        self._write(trainer, val_loss=loss, val_bits_per_byte=loss / math.log(2))
        self._tick = time.perf_counter()

    def _write(self, trainer: Trainer, **values: float) -> None:
        if trainer.is_global_zero:
            row = {"step": trainer.global_step, "train_seconds": round(self._seconds, 3), **values}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
