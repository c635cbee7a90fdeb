"""The byte-level GPT as a LightningModule: loss, parameter groups, learning-rate schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from gpt_model import GPT, GPTConfig


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    weight_decay: float
    betas: Sequence[float]

    def scale(self, step: int, total: int) -> float:
        """The learning rate of a step as a share of ``lr``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / max(total - self.warmup_steps, 1), 1.0)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; norms and biases do not. Ties count once."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


class GPTModule(LightningModule):
    """Trains a :class:`GPT`. The hyper-parameters are plain dicts, so that any checkpoint can rebuild it."""

    def __init__(self, model: dict[str, Any], optim: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model_config = GPTConfig(**model)
        self.optim_config = OptimConfig(**optim)
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Build the model here, where a strategy may shard it as it is made."""
        if self.model is None:
            self.model = GPT(self.model_config)

    def training_step(self, windows: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """The loss, and once more detached: Lightning divides the first by the number of micro-batches."""
        assert self.model is not None
        loss = self.model.loss(windows)
        return {"loss": loss, "micro_loss": loss.detach()}

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Log the mean over all windows of all ranks."""
        assert self.model is not None
        self.log_validation(self.model.loss(windows), len(windows))

    def log_validation(self, loss: Tensor, windows: int) -> None:
        """Log the loss of so many windows, and the same in bits per byte."""
        self.log("val_loss", loss, sync_dist=True, batch_size=windows)
        self.log("val_bpb", loss / math.log(2), prog_bar=True, sync_dist=True, batch_size=windows)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in two groups, its schedule advanced once per optimizer step."""
        config, total = self.optim_config, int(self.trainer.estimated_stepping_batches)
        groups = decay_groups(self, config.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.scale(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
