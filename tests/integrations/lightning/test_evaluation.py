"""validate, test and predict, also where ranks have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.integrations.lightning.trainers import Module, data, error, loader, trainer, weights, zero
from tests.launcher import Launcher

STAGES = (0, 1, 2, 3)


class Endless(IterableDataset[Any]):
    """A stream whose length nobody knows; rank 1 gets four samples more."""

    def __iter__(self) -> Iterator[Any]:
        samples = data(20)
        for index in range(3 + 4 * dist.get_rank()):
            yield samples[index]


def uneven(rows: int = 4, more: int = 6) -> DataLoader[Any]:
    """Batches of two; rank 1 gets `more` rows more."""
    tensors = data(32).tensors
    return DataLoader(TensorDataset(*(tensor[: rows + more * dist.get_rank()] for tensor in tensors)), 2)


def metrics(strategy: Any) -> dict[str, list[float]]:
    module = Module()
    found = {}
    run = trainer(strategy)
    for name, loop, batches in (
        ("even", run.validate, loader(8)),
        ("sampled", run.test, DataLoader(data(13), 2)),
        ("uneven", run.validate, uneven()),
        ("stream", run.test, DataLoader(Endless(), 1)),
        ("two loaders", run.validate, [uneven(), uneven(8, -4)]),
    ):
        results = loop(module, batches, verbose=False)  # type: ignore[operator]
        found[name] = [value for result in results for value in result.values()]
    return found


def test_metrics_are_those_of_ddp(ranks: Launcher) -> None:
    expected = ranks(2)(metrics, "ddp")
    for stage in STAGES:
        assert ranks(2)(metrics_at, stage) == expected


def metrics_at(stage: int) -> dict[str, list[float]]:
    return metrics(zero(stage))


def predictions(stage: int) -> dict[str, Any]:
    module = Module()
    run = trainer(zero(stage), use_distributed_sampler=True)
    parts = run.predict(module, DataLoader(data(13), 2))
    assert parts is not None
    limited = trainer(zero(stage), limit_predict_batches=2).predict(module, uneven(6, 2))
    with torch.no_grad():
        expected = Module().net(data(13).tensors[0])
    return {"parts": parts, "limited": len(limited or []), "expected": expected}


@pytest.mark.parametrize("stage", STAGES)
def test_predict_gives_every_sample_once(ranks: Launcher, stage: int) -> None:
    """Thirteen samples: one rank has a sample, and with batches of two no batch, more."""
    first, second = ranks(2)(predictions, stage)
    assert (len(first["parts"]), len(second["parts"])) == (4, 3)
    ours = torch.empty(13, 1)
    ours[0::2], ours[1::2] = torch.cat(first["parts"]), torch.cat(second["parts"])
    assert torch.allclose(ours, first["expected"], atol=1e-6)
    assert first["limited"] == second["limited"] == 2


def during_fit(stage: int) -> list[float]:
    """An uneven validation must leave training as it is."""
    seen = []

    class CollectiveRecord(Module):
        def on_validation_epoch_end(self) -> None:
            with torch.no_grad():
                seen.append(float(self.net(data(4).tensors[0]).sum()))

    module, plain = CollectiveRecord(), Module()
    run = trainer(zero(stage), max_epochs=2, num_sanity_val_steps=2, val_check_interval=2)
    run.fit(module, loader(), uneven())
    trainer("ddp", max_epochs=2).fit(plain, loader())
    assert error(weights(module), weights(plain)) < 2e-6
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_uneven_validation_inside_fit(ranks: Launcher, stage: int) -> None:
    first, second = ranks(2)(during_fit, stage)
    assert first == second and len(first) == 5


class Inference(Module):
    """Runs its steps in inference mode, as Lightning does wherever the backend is not gloo."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.inference_mode():
            loss = self.loss(batch)
        self.log("val_loss", float(loss), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            return super().predict_step(batch, batch_idx)


def inference_then_training() -> float:
    module, plain = Inference(), Module()
    run = trainer(zero(3), max_epochs=2)
    run.predict(module, loader(8))
    run.fit(module, loader(), loader(8))
    trainer("ddp", max_epochs=2).fit(plain, loader())
    return error(weights(module), weights(plain))


def test_inference_mode_leaves_nothing_that_cannot_train(ranks: Launcher) -> None:
    assert max(ranks(2)(inference_then_training)) < 2e-6


def fit_validate_test(tmp: str) -> list[float]:
    """All runs of one Trainer share one engine; a loaded checkpoint changes weights only."""
    module = Module()
    run = trainer(zero(3))
    run.fit(module, loader(), loader(8))
    engine = run.strategy.engine  # type: ignore[attr-defined]
    run.save_checkpoint(f"{tmp}/fit.ckpt")
    before = run.validate(module, loader(8), verbose=False)[0]["val_loss"]
    run.fit(module, loader())
    after = run.test(module, loader(8), ckpt_path=f"{tmp}/fit.ckpt", verbose=False)[0]["test_loss"]
    assert run.strategy.engine is engine  # type: ignore[attr-defined]
    return [before, after]


def test_one_engine_for_all_runs(ranks: Launcher, tmp_path: Path) -> None:
    for before, after in ranks(2)(fit_validate_test, str(tmp_path)):
        assert before == after
