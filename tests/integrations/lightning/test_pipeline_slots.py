"""A Trainer's pipelines in slots: the same bits at any number of stages and copies, also of resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy
from tests.integrations.lightning.test_slots import Curve, rows
from tests.integrations.lightning.trainers import trainer
from tests.launcher import Launcher, RankError
from tests.reproducible.pipelines import digest_of, layers, noisy_loss
from zero_strategy.pipeline.module import PipelineModule

SLOTS, ROWS = 4, 2
"""Of a step; samples of a slot."""


class Lit(pl.LightningModule):
    pipeline: PipelineModule

    def configure_pipeline(self) -> Any:
        torch.manual_seed(5)
        return layers(3)

    def pipeline_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return noisy_loss(outputs, labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline.loss((batch[0][:, :-1], batch[0][:, 1:]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    copies: int, strategy: dict[str, Any], folder: str | None = None, resume: str | None = None, **flags: Any
) -> tuple[str, list[tuple[int, float]], int]:
    torch.set_num_threads(1)
    curve = Curve()
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "use_distributed_sampler": True,
        "logger": curve,
        "log_every_n_steps": 1,
        "gradient_clip_val": 0.5,
        **flags,
    }
    if folder is not None:
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        settings |= {"callbacks": [saves], "enable_checkpointing": True}
    made = trainer(zero_strategy.PipelineStrategy(**strategy, reproducible={"slots": SLOTS, "seed": 7}), **settings)
    data = TensorDataset(rows().tensors[0][:28])  # the last step of an epoch is filled up
    made.fit(Lit(), DataLoader(data, ROWS * SLOTS // copies, shuffle=True), ckpt_path=resume)
    return digest_of(made.strategy.engine, made.optimizers[0]), curve.curve, made.global_step


def test_a_trainers_pipelines_in_slots_have_the_same_bits(ranks: Launcher, tmp_path: Path) -> None:
    """One stage, two, two copies of two; from inside of an epoch on with another number of both."""
    runs = {
        1: (1, {"stages": 1}),
        2: (1, {"stages": 2, "schedule": "zb_h1"}),
        4: (2, {"stages": 2, "zero_stage": 3}),
    }
    found = {world: ranks(world)(fit, *run, str(tmp_path / str(world)))[0] for world, run in runs.items()}
    assert len(set(map(str, found.values()))) == 1, found
    digest, curve, steps = found[1]
    assert steps == len(curve) == 8
    for before, world, step in ((4, 1, 2), (1, 2, 6), (2, 4, 4)):
        resume = str(tmp_path / str(before) / f"step={step}.ckpt")
        for again in ranks(world)(fit, *runs[world], None, resume)[:1]:
            assert again == (digest, curve[step:], steps), (before, world, step)


def refuse(batch: int, flags: dict[str, Any]) -> None:
    strategy = zero_strategy.PipelineStrategy(stages=2, reproducible=SLOTS)
    trainer(strategy, use_distributed_sampler=True, **flags).fit(Lit(), DataLoader(rows(), batch))


@pytest.mark.parametrize(
    ("batch", "flags", "said"),
    [
        (6, {}, "a batch of 6 samples is 4 slots of a pipeline's copy: make batch_size a multiple of 4"),
        (8, {"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\), and reproducible.slots is 4.* a step is 1"),
    ],
)
def test_batches_that_are_no_slots_of_a_pipeline(ranks: Launcher, batch: int, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(RankError, match=said):
        ranks(2)(refuse, batch, flags)
