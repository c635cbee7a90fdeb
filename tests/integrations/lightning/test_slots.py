"""A Trainer in slots: the bits of the loop's, on any number of ranks, also where it goes on at another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from tests.integrations.lightning.trainers import trainer, zero
from tests.launcher import Launcher, RankError
from tests.reproducible.training import LENGTH, VOCABULARY, Language, digest_of

ROWS = 58
"""Of which the last step of an epoch is filled up."""


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator))


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.language = Language()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randint(1, VOCABULARY, (1,))  # before any forward of a module
        tokens = torch.where(batch[0] == 1, noise, batch[0])
        loss: Tensor = self.language(tokens)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Curve(pl.loggers.logger.DummyLogger):
    """Keeps the losses that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[tuple[int, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "zero/loss" in metrics:
            self.curve.append((int(step or 0), metrics["zero/loss"]))


def fit(
    stage: int, slots: int, tmp: str | None = None, resume: str | None = None, steps: int = -1, **flags: Any
) -> tuple[str, list[tuple[int, float]], int]:
    torch.set_num_threads(1)
    curve = Curve()
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "max_steps": steps,
        "use_distributed_sampler": True,
        "logger": curve,
        "log_every_n_steps": 1,
        "gradient_clip_val": 0.5,
        **flags,
    }
    if tmp is not None:
        saves = ModelCheckpoint(tmp, "{step}", every_n_train_steps=1, save_top_k=-1)
        settings |= {"callbacks": [saves], "enable_checkpointing": True}
    strategy = zero(stage, reproducible={"slots": slots, "seed": 7})
    made = trainer(strategy, **settings)
    made.fit(Lit(), DataLoader(rows(), 2, shuffle=True), ckpt_path=resume)
    return digest_of(made.strategy.engine), curve.curve, made.global_step


@pytest.mark.parametrize("flags", [{}, {"precision": "bf16-true"}, {"precision": "16-mixed"}], ids=str)
def test_a_trainer_in_slots_has_the_same_bits_on_any_ranks(ranks: Launcher, flags: dict[str, Any]) -> None:
    found = {}
    for world, stage in ((1, 3), (2, 1), (2, 3), (4, 2)):
        results = ranks(world)(fit, stage, 4, **flags)
        assert len(set(digest for digest, _, _ in results)) == 1
        found[world, stage] = results[0]
    assert len(set(map(str, found.values()))) == 1, found
    _, curve, steps = found[1, 3]
    assert steps == 2 * 8 and len(curve) == steps


def test_a_run_in_slots_goes_on_at_another_number_of_ranks(ranks: Launcher, tmp_path: Path) -> None:
    """Inside of an epoch, at its end, and in the next one."""
    whole = ranks(1)(fit, 3, 12)[0]
    for world, stage, going_on in ((2, 3, ((1, 1), (2, 4))), (3, 2, ((3, 2),))):
        folder = tmp_path / str(world)
        ranks(world)(fit, stage, 12, str(folder))
        for step, there in going_on:
            digest, curve, steps = ranks(there)(fit, 3, 12, None, str(folder / f"step={step}.ckpt"))[0]
            assert (digest, steps) == (whole[0], whole[2]), (world, step, there)
            assert curve == whole[1][step:], (world, step, there)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def refuse(what: str) -> None:
    flags: dict[str, Any] = {"use_distributed_sampler": True}
    loader: Any = DataLoader(rows(), 2, shuffle=True)
    if what == "accumulation":
        flags["accumulate_grad_batches"] = 3
    elif what == "iterable":
        loader = DataLoader(Stream(), 2)
    elif what == "sampler":
        loader = DataLoader(rows(), 2, sampler=RandomSampler(rows(), replacement=True))
        flags["use_distributed_sampler"] = False
    trainer(zero(3, reproducible=4), **flags).fit(Lit(), loader)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("accumulation", r"accumulate_grad_batches=3\), and reproducible.slots is 4: on 2 rank\(s\) a step is 2"),
        ("iterable", "has an iterable dataset"),
        ("sampler", "has a RandomSampler, which knows ranks and no slots"),
    ],
)
def test_what_has_no_slots_is_refused_by_the_trainer(ranks: Launcher, what: str, said: str) -> None:
    assert dist.is_available()
    with pytest.raises(RankError, match=said):
        ranks(2)(refuse, what)
