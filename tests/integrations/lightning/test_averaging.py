"""Lightning's averaging callbacks on shards, against the same callbacks under DDP, to the bit."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zero_strategy
from tests.integrations.lightning.trainers import Module, loader, raises, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy.convert.convert import convert
from zero_strategy.engine import ZeroEngine

FLAGS: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1}


class Counting(Module):
    """With a buffer that changes and is averaged, too, and what each validation saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.count += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.detach())
        self.log("val_loss", loss, sync_dist=True)


class OddSteps(WeightAveraging):
    """Averages after odd steps and each epoch, with a hook of its own."""

    def __init__(self) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=False)
        self.fits = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None or (step_idx is not None and step_idx % 2 == 1)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.fits += 1


CALLBACKS = {
    "exponential": lambda: EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_step=1),
    "mean": lambda: WeightAveraging(),
    "own": OddSteps,
    "stochastic": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=2),
}


def fitted(strategy: Any, name: str, **flags: Any) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
    module, callback = Counting(), CALLBACKS[name]()
    run = trainer(strategy, callbacks=[callback], **(FLAGS | flags))
    run.fit(module, loader(), loader(16, seed=1))
    assert isinstance(run.callbacks[0], type(callback)) or name != "own"
    assert getattr(callback, "fits", 1) == 1  # the user's object, too, knows what its hooks have done
    return module.seen, weights(module), {key: float(value) for key, value in run.callback_metrics.items()}


@functools.cache
def by_ddp(name: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
    """Plain data, which a rank needs at every stage."""
    return fitted("ddp", name)


def compared(name: str, stage: int) -> list[str]:
    seen, ours, metrics = fitted(zero(stage, fused_optimizers=False), name)
    wanted, theirs, other_metrics = by_ddp(name)
    wrong = [f"validation {number}" for number, pair in enumerate(zip(seen, wanted)) if not torch.equal(*pair)]
    wrong += [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    wrong += [key for key in other_metrics if metrics[key] != other_metrics[key]]
    assert len(seen) == len(wanted) > 3
    return wrong


# What swaps weights by itself at every stage; the others, which take the same average of a stage, at two of them each.
AT_STAGES = {"exponential": (0, 1, 2, 3), "mean": (1, 3), "own": (0, 2), "stochastic": (0, 1, 2, 3)}


@pytest.mark.parametrize(("stage", "name"), [(stage, name) for name in CALLBACKS for stage in AT_STAGES[name]])
def test_what_is_validated_and_what_is_left_is_that_of_ddp(ranks: Launcher, name: str, stage: int) -> None:
    assert ranks(2)(compared, name, stage) == [[], []]


class Normed(Counting):
    """With BatchNorm, whose statistics a stochastic average sets anew in one more epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]


def with_statistics(name: str) -> list[str]:
    trained = []
    for strategy in (zero(3, fused_optimizers=False), zero(1, fused_optimizers=False), "auto"):
        module = Normed()
        trainer(strategy, callbacks=[CALLBACKS[name]()], **FLAGS).fit(module, loader(), loader(16, seed=1))
        trained.append({**weights(module), **{str(number): loss for number, loss in enumerate(module.seen)}})
    return [key for key in trained[2] if not all(torch.equal(each[key], trained[2][key]) for each in trained[:2])]


@pytest.mark.parametrize("name", ["exponential", "own", "stochastic"])
def test_statistics_of_batch_norm_are_those_of_plain_lightning(ranks: Launcher, name: str) -> None:
    assert ranks(1)(with_statistics, name) == [[]]


def not_fitting() -> None:
    trainer("zero3", callbacks=[WeightAveraging()]).test(Counting(), loader(8), verbose=False)


def test_a_callback_averages_nothing_where_nothing_is_fitted(ranks: Launcher) -> None:
    ranks(2)(not_fitting)


# ------------------------------------------------------------------------------------- checkpoints


def resumed(name: str, stage: int, later: int, folder: str, whole: bool) -> tuple[list[str], list[Tensor]]:
    """A run in two parts against one in one, at another stage; and what a checkpoint shows to who only tests."""
    settings: dict[str, Any] = {"checkpoint": {"format": "file"}} if whole else {}
    saves = ModelCheckpoint(folder, "epoch-1", every_n_epochs=1, save_last=False)
    flags = {"enable_checkpointing": True, "max_epochs": 1}
    module = Counting()
    run = trainer(zero(stage, **settings), callbacks=[CALLBACKS[name](), saves], **flags)
    run.fit(module, loader(), loader(16, seed=1))
    path = saves.best_model_path
    module = Counting()
    run = trainer(zero(later, **settings), callbacks=[CALLBACKS[name]()], max_epochs=3)
    run.fit(module, loader(), loader(16, seed=1), ckpt_path=path)
    found = weights(module)
    module = Counting()
    run = trainer(zero(stage), callbacks=[CALLBACKS[name]()], max_epochs=3)
    run.fit(module, loader(), loader(16, seed=1))
    wanted = weights(module)
    wrong = [key for key in wanted if not torch.equal(found[key], wanted[key])]
    shown = Counting()
    trainer(zero(later)).test(shown, loader(16, seed=2), ckpt_path=path, verbose=False)
    alone = zero_strategy.load_from_checkpoint(Counting, path) if not whole else Counting.load_from_checkpoint(path)
    return wrong, [*weights(shown).values(), *weights(alone).values()]


def test_a_run_resumes_at_another_stage(ranks: Launcher, tmp_path: Path) -> None:
    for wrong, shown in ranks(2)(resumed, "exponential", 3, 1, str(tmp_path), False):
        half = len(shown) // 2
        assert wrong == [] and all(map(torch.equal, shown[:half], shown[half:]))


def test_a_run_resumes_from_a_whole_file(ranks: Launcher, tmp_path: Path) -> None:
    for wrong, shown in ranks(2)(resumed, "mean", 2, 3, str(tmp_path), True):
        half = len(shown) // 2
        assert wrong == [] and all(map(torch.equal, shown[:half], shown[half:]))


def test_a_stochastic_average_resumes(ranks: Launcher, tmp_path: Path) -> None:
    for wrong, _ in ranks(2)(resumed, "stochastic", 1, 3, str(tmp_path), False):
        assert wrong == []


def taken_over(name: str, folder: str) -> list[str]:
    """Saved by a sharded run as a directory, converted to a file of Lightning's, resumed under DDP."""
    saves = ModelCheckpoint(folder, "first", save_last=False)
    flags = {"enable_checkpointing": True, "max_epochs": 1}
    run = trainer(zero(3, fused_optimizers=False), callbacks=[CALLBACKS[name](), saves], **flags)
    run.fit(Counting(), loader(), loader(16, seed=1))
    file = f"{folder}/converted.ckpt"
    if run.is_global_zero:
        convert(saves.best_model_path, file, to_format="lightning")
    torch.distributed.barrier()
    trained = []
    for strategy, path in (("ddp", file), (zero(2, fused_optimizers=False), saves.best_model_path)):
        module = Counting()
        run = trainer(strategy, callbacks=[CALLBACKS[name]()], max_epochs=3)
        run.fit(module, loader(), loader(16, seed=1), ckpt_path=path, weights_only=False)
        trained.append(weights(module))
    return [key for key in trained[0] if not torch.equal(trained[0][key], trained[1][key])]


@pytest.mark.parametrize("name", ["exponential", "stochastic"])
def test_ddp_goes_on_with_a_converted_checkpoint(ranks: Launcher, tmp_path: Path, name: str) -> None:
    assert ranks(2)(taken_over, name, str(tmp_path)) == [[], []]


# ------------------------------------------------------------------------------------- misuse


class OwnSwap(WeightAveraging):
    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        raise AssertionError("is never reached")


def refused() -> None:
    with raises(ValueError, "OwnSwap", "_swap_models()", "engine.average_weights", "ddp"):
        trainer("zero2", callbacks=[OwnSwap()]).fit(Counting(), loader())
    with raises(ValueError, "EMAWeightAveraging and WeightAveraging", "leave one"):
        trainer("zero2", callbacks=[EMAWeightAveraging(), WeightAveraging()]).fit(Counting(), loader())
    with raises(TypeError, "each element by itself"):
        trainer("zero2", callbacks=[WeightAveraging(avg_fn=lambda a, w, n: a - w.mean())]).fit(Counting(), loader())


def test_what_shards_cannot_do_is_refused_by_name(ranks: Launcher) -> None:
    ranks(2)(refused)


def fitted_again() -> tuple[int, bool, bool]:
    """A copy of the Trainer fits, the Trainer fits once more, and without the callback nothing is averaged."""
    callback = EMAWeightAveraging(decay=0.5)
    run = trainer(zero(2), callbacks=[callback])
    run.fit(Counting(), loader())
    other = copy.deepcopy(run)
    other.fit(Counting(), loader())
    module = Counting()
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    engine = run.strategy.engine
    assert isinstance(engine, ZeroEngine) and engine.average is not None
    updates = engine.average.updates
    plain = trainer(zero(2))
    plain.fit(module, loader())
    return updates, plain.strategy.engine.average is None, type(copy.deepcopy(run.callbacks[0])) is EMAWeightAveraging


def test_trainers_fit_again_and_are_copied(ranks: Launcher) -> None:
    assert ranks(2)(fitted_again) == [(4, True, True)] * 2
