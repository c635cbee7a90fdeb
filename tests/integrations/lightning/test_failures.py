"""After an exception: checkpoints are saved if all ranks are there, and never waited for if not."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from tests.integrations.lightning.trainers import Module, error, loader, raises, trainer, weights, zero
from tests.launcher import Launcher, RankError
from zero_strategy.integrations.lightning.callbacks import BatchEnd


class Stumbling(Module):
    """Fails in the third batch of the first epoch on some ranks, or (in a second fit) not at all."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise ArithmeticError("stumbled")
        return loss


def all_fail(tmp: str) -> float:
    saving = ModelCheckpoint(tmp, "saved", save_on_exception=True)
    module, expected = Stumbling((0, 1)), Module()
    with raises(ArithmeticError, "stumbled"):
        trainer(zero(3), enable_checkpointing=True, callbacks=[saving]).fit(module, loader())
    path = os.path.join(tmp, "saved.ckpt")
    resumed = Module()
    trainer(zero(1), max_steps=2).validate(resumed, loader(8), ckpt_path=path, verbose=False)
    trainer("ddp", max_steps=2).fit(expected, loader())
    assert error(weights(resumed), weights(expected)) < 2e-6
    # The module was torn out of a step; it can be trained on.
    module.ranks = ()
    trainer(zero(3)).fit(module, loader(), ckpt_path=None)
    return error(weights(module), weights(module))


def test_a_failure_of_all_ranks_is_saved_and_survived(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(all_fail, str(tmp_path)) == [0, 0]


def one_fails(tmp: str) -> None:
    saving = ModelCheckpoint(tmp, "saved", save_on_exception=True)
    run = trainer(zero(3, barrier_seconds=1.0), enable_checkpointing=True, callbacks=[saving])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run.fit(Stumbling((1,)), loader())


def test_a_failure_of_one_rank_does_not_wait(ranks: Launcher, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2)(one_fails, str(tmp_path))
    failure = caught.value.failures[1]
    assert failure.exception.endswith("ArithmeticError")
    assert "not all ranks did" in failure.log
    assert not (tmp_path / "saved.ckpt").exists()
    assert time.monotonic() - begun < 30


class Timed(Stumbling):
    """Says when it came to the batch that fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.reached = time.monotonic()
        return super().training_step(batch, batch_idx)


def one_raises() -> None:
    module = Timed((1,))
    try:
        trainer("zero2").fit(module, loader())
    except Exception:
        seconds = time.monotonic() - module.reached
        assert seconds < 10, f"{seconds:.1f} s"
        raise


def test_all_ranks_are_told_who_raised(ranks: Launcher) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=60, grace=15.0)(one_raises)
    failures = caught.value.failures
    assert set(failures) == {0, 1}, str(caught.value)
    assert failures[1].exception.endswith("ArithmeticError")
    assert failures[0].exception.endswith("DesyncError"), failures[0].text
    assert "rank 1 raised ArithmeticError: stumbled (" in failures[0].text, failures[0].text
    assert "test_failures.py:" in failures[0].text


class Breaking(Module):
    """A backward fails, until it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.breaks:
            hidden = self.net.out.weight * 1.0
            hidden.register_hook(self.fail)
            loss = loss + hidden.sum()
        return loss

    @staticmethod
    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("stumbled")


class Clumsy(Callback):
    """Fails where it should look after a failure."""

    def on_exception(self, *_: Any) -> None:
        raise OSError("disk full")


def left_in_the_middle(second: str) -> list[str]:
    """Faults after a fit that Lightning has left without a teardown, and the next one."""
    module, found = Breaking(), []
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(zero(3), callbacks=[Clumsy()])
    with raises(OSError, "disk full"):
        run.fit(module, loader())
    if run.strategy.busy:
        found.append("busy")
    module.breaks = False
    following = {
        "the same Trainer": lambda: run,
        "the same settings": lambda: trainer(zero(3)),
        "other settings": lambda: trainer(zero(1)),
    }[second]()
    following.fit(module, loader())
    if signal.getsignal(signal.SIGTERM) != before:
        found.append("a handler of SIGTERM")
    found += [f"callback {type(one).__name__}" for one in run.callbacks if isinstance(one, BatchEnd)]
    expected = Module()
    trainer("ddp").fit(expected, loader())
    if not error(weights(module), weights(expected)) < 2e-6:
        found.append("weights")
    return found


@pytest.mark.parametrize("second", ["the same Trainer", "the same settings", "other settings"])
def test_a_fit_works_after_a_callback_that_failed_in_its_on_exception(ranks: Launcher, second: str) -> None:
    assert ranks(2)(left_in_the_middle, second) == [[], []]
