"""Offloading under the integrations: what Trainer(strategy="zero3_offload") trains is what "zero3" trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy
from tests.launcher import Launcher

STRATEGIES = ("zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(strategy: Any, folder: Path, checkpoint: str | None = None) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = Module()
    data = DataLoader(TensorDataset(torch.randn(32, 48)), batch_size=4)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, data, ckpt_path=checkpoint)
    assert isinstance(trainer.strategy, zero_strategy.ZeroStrategy)
    assert trainer.strategy.engine is not None
    return trainer.strategy.engine.full_state_dict()


def names(folder: Path) -> list[str]:
    wrong = []
    plain: dict[str, dict[str, Tensor]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZERO_STRATEGY_NVME_PATH", str(folder))
        for strategy in STRATEGIES:
            found = fit(strategy, folder / strategy)
            expected = plain.setdefault(strategy.partition("_")[0], found)
            wrong += [f"{strategy} {name}" for name in expected if not torch.equal(found[name], expected[name])]
    keywords = zero_strategy.ZeroStrategy(stage=3, offload={"optimizer": "nvme", "nvme_path": [str(folder)]})
    found = fit(keywords, folder / "keywords")
    return wrong + [name for name, value in plain["zero3"].items() if not torch.equal(found[name], value)]


def test_strategy_names_that_offload(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(names, tmp_path) == [[]]


def test_a_drive_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_STRATEGY_NVME_PATH", raising=False)
    with pytest.raises(ValueError, match=r"offload\.nvme_path is empty.*ZERO_STRATEGY_NVME_PATH"):
        Trainer(strategy="zero3_nvme", accelerator="cpu", devices=1)
