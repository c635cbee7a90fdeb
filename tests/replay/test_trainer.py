"""A Trainer's run in slots, trained again from its LightningModule and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.lightning.trainers import trainer, zero
from tests.launcher import Launcher
from tests.reproducible.training import LENGTH, VOCABULARY, Language
from zero_strategy.replay import replay
from zero_strategy.replay.run_journal import read_run_journal
from zero_strategy.reproducible.samples import SlotSampler

SLOTS, ROWS = 4, 24


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator))


class Lit(pl.LightningModule):
    """Draws before its forward, and its learning rate falls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.language = Language(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randint(1, VOCABULARY, (1,))
        loss: Tensor = self.language(torch.where(batch[0] == 1, noise, batch[0]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(directory: str) -> None:
    torch.set_num_threads(1)
    diagnostics = {"run_dir": directory, "flops": False, "journal_weights_every_n_steps": 1}
    strategy = zero(3, reproducible={"slots": SLOTS, "seed": 7}, diagnostics=diagnostics)
    saves = ModelCheckpoint(f"{directory}/checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": True, "gradient_clip_val": 0.5}
    made = trainer(strategy, callbacks=[saves], enable_checkpointing=True, **settings)
    made.fit(Lit(), DataLoader(rows(), 2, shuffle=True))


def again() -> Any:
    sampler = SlotSampler(rows(), SLOTS, range(SLOTS), 2)
    return Lit(), DataLoader(rows(), 2, sampler=sampler)


def test_a_step_of_a_trainer_is_trained_again(ranks: Launcher, tmp_path: Path) -> None:
    """From the beginning, and from the Trainer's checkpoint; another batch is told."""
    ranks(2)(fit, str(tmp_path))
    journal = read_run_journal(tmp_path)
    assert journal.steps == [0, 1, 2]
    slots = journal.view(1).slots.values()
    assert all(entry.batch and entry.loss_value for entry in slots)
    report = replay(tmp_path, 2, again)
    assert report.equal and report.start == 2 and report.checkpoint is not None, str(report)
    empty = tmp_path / "empty"
    empty.mkdir()
    report = replay(tmp_path, 2, again, checkpoints=empty)
    assert report.equal and report.start == 0, str(report)
    found = replay(tmp_path, 2, lambda: (Lit(), list(again()[1])[::-1]), checkpoints=empty).difference
    assert found is not None and (found.kind, found.step, found.slot, found.ranks) == ("data", 0, "slot 0", (0,))
