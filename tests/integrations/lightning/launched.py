"""A script as a user would start it: `python launched.py MODE FOLDER`. Rank 0 prints `result: ...` at its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import zero_strategy
from tests.integrations.lightning.trainers import PLAIN, Module, error, loader, weights


class Failing(Module):
    """One rank fails in the second batch; the other goes on into a collective."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.rank:
            raise ArithmeticError("this rank fails")
        return super().training_step(batch, batch_idx)


def quiet(strategy: Any, devices: int, folder: str | None = None, **flags: Any) -> pl.Trainer:
    callbacks = [ModelCheckpoint(folder, monitor="val_loss")] if folder else []
    settings = {**PLAIN, "max_epochs": 2, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    flags = {**settings, "callbacks": callbacks, "enable_checkpointing": bool(folder), **flags}
    return pl.Trainer(strategy=strategy, devices=devices, **flags)


def expected() -> dict[str, Tensor]:
    """Both ranks see the same batches here, which is as good as one rank."""
    module = Module()
    quiet("auto", 1).fit(module, all_rows())
    return weights(module)


def train(strategy: str, folder: str) -> str:
    module = Module()
    trainer = quiet(strategy, 2, folder)
    trainer.fit(module, all_rows(), all_rows())
    trained = weights(module)
    assert torch.isfinite(trained["scale"])
    loss = trainer.callback_metrics["val_loss"]
    tested = trainer.test(Module(), all_rows(), ckpt_path="best", verbose=False)[0]["test_loss"]
    assert abs(tested - float(loss)) < 1e-5, (tested, loss)
    if trainer.is_global_zero:
        assert error(trained, expected()) < 2e-6
    return f"{strategy} {Path(trainer.checkpoint_callback.best_model_path).is_dir()}"  # type: ignore[union-attr]


def all_rows() -> Any:
    return loader(split=False)


def main(mode: str, folder: str) -> None:
    if mode == "multiprocessing":
        result = " ".join(train(name, f"{folder}/{name}") for name in ("zero3_fork", "zero2_spawn"))
    elif mode.startswith("fail"):
        quiet(zero_strategy.ZeroStrategy(stage=3), 2).fit(Failing(int(mode[-1])), all_rows())
        result = "nobody failed"
    else:
        result = train("zero3", folder)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print("result:", result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2])
