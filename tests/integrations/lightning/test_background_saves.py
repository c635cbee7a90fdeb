"""ModelCheckpoint's saves go on while training does; nothing is removed before the next one is there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.integrations.lightning.trainers import Module, error, loader, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy.checkpoint import CheckpointWriter
from zero_strategy.cli.checkpoint_checks import verify


class SlowDisk(pl.Callback):
    """From step 4 on writes wait for step 6, or fail on rank 1; notes what lies in the folder before each batch."""

    def __init__(self, folder: str, fails: bool) -> None:
        self.folder, self.fails, self.seen, self.background = folder, fails, dict[int, list[str]](), set[str]()
        self.go, self.placeholders = threading.Event(), dict[int, list[str]]()
        self._write = CheckpointWriter.write_all

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        write, outer = self._write, self

        def slow(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
            outer.background.add(threading.current_thread().name)
            if "step=4" in writer.directory.name:
                assert outer.go.wait(60)
                if outer.fails and dist.get_rank() == 1:
                    raise OSError(28, "No space left on device")
            write(writer, *args, **kwargs)

        CheckpointWriter.write_all = slow  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        self.seen[step] = sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []
        if "step=4.ckpt" in self.seen[step]:
            self.placeholders[step] = os.listdir(os.path.join(self.folder, "step=4.ckpt"))
        if step == 2:  # what user code saves is there at once
            trainer.save_checkpoint(os.path.join(self.folder, "..", "own.ckpt"))
            self.seen[-2] = os.listdir(os.path.join(self.folder, "..", "own.ckpt"))
        if step == 5:
            self.go.set()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.go.set()
        CheckpointWriter.write_all = self._write  # type: ignore[method-assign]


def fit(tmp: str, fails: bool) -> dict[str, Any]:
    folder = os.path.join(tmp, "checkpoints")
    slow = SlowDisk(folder, fails)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    module = Module()
    run = trainer(zero(3), max_steps=6, max_epochs=3, callbacks=[slow, saves], enable_checkpointing=True)
    found: dict[str, Any] = {"error": ""}
    try:
        run.fit(module, loader())
    except Exception as caught:
        found["error"] = f"{type(caught).__name__}: {caught}"
        slow.teardown(run, module, "fit")
        return found | {"seen": slow.seen}
    again = Module()
    other = trainer(zero(2))
    other.validate(again, loader(8), ckpt_path=saves.best_model_path, verbose=False)
    return found | {
        "seen": slow.seen,
        "threads": slow.background,
        "placeholders": slow.placeholders,
        "best": os.path.basename(saves.best_model_path),
        "difference": error(weights(again), weights(module)),
    }


def test_the_last_checkpoint_stays_until_the_next_is_there(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(fit, str(tmp_path), False):
        assert found["error"] == ""
        complete = {step: [name for name in names if name[0] != "."] for step, names in found["seen"].items()}
        assert "step=2.ckpt" in complete[5] and found["placeholders"][5] == []  # its name is taken, no more
        assert "manifest.json" in found["seen"][-2]
        assert "checkpoint" in found["threads"] and found["best"] == "step=6.ckpt"
        assert found["difference"] == 0
    assert os.listdir(tmp_path / "checkpoints") == ["step=6.ckpt"]
    assert verify(tmp_path / "checkpoints" / "step=6.ckpt").problems == ()


def test_a_failed_save_ends_the_fit_and_leaves_the_one_before(ranks: Launcher, tmp_path: Path) -> None:
    first, second = ranks(2)(fit, str(tmp_path), True)
    assert second["error"].startswith("OSError: [Errno 28] No space left")
    assert first["error"].startswith("FailedElsewhereError: failed on other rank(s): {1: ")
    assert max(first["seen"]) == max(second["seen"])
    assert os.listdir(tmp_path / "checkpoints") == ["step=2.ckpt"]
    assert verify(tmp_path / "checkpoints" / "step=2.ckpt").problems == ()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_setting(ranks: Launcher, tmp_path: Path, asynchronous: bool) -> None:
    for threads in ranks(2)(who_writes, str(tmp_path), asynchronous):
        assert threads == ({"checkpoint"} if asynchronous else {"MainThread"})


def who_writes(tmp: str, asynchronous: bool) -> set[str]:
    write, threads = CheckpointWriter.write_all, set[str]()

    def noting(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        threads.add(threading.current_thread().name)
        write(writer, *args, **kwargs)

    CheckpointWriter.write_all = noting  # type: ignore[method-assign]
    try:
        saves = ModelCheckpoint(tmp, every_n_train_steps=2)
        strategy = zero(1, checkpoint={"asynchronous": asynchronous})
        run = trainer(strategy, max_steps=4, callbacks=[saves], enable_checkpointing=True)
        run.fit(Module(), loader())
    finally:
        CheckpointWriter.write_all = write  # type: ignore[method-assign]
    return {"MainThread" if name.startswith("Dummy") or "rank" in name else name for name in threads}


class Fails(Module):
    """A batch that cannot be trained, on all ranks or on one."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, number: int) -> Any:
        if number == 3 and self.rank in (None, dist.get_rank()):
            raise ValueError("a bad batch")
        return super().training_step(batch, number)


def failing(folder: str) -> tuple[list[str], list[str], str]:
    """Threads of saves that are alive after a fit has raised, what lies in the folder, and what `verify` says of it."""
    module = Fails(None)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_on_exception=True)
    run = trainer(zero(2, checkpoint={"bytes_per_second": 4000}), enable_checkpointing=True, callbacks=[saves])
    with pytest.raises(ValueError, match="a bad batch"):
        run.fit(module, loader())
    alive = [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]
    dist.barrier()
    found = sorted(os.listdir(folder))
    dist.barrier()
    return alive, found, "; ".join(str(verify(Path(folder) / name).problems or "") for name in found)


def test_a_fit_that_raises_waits_for_its_saves(ranks: Launcher, tmp_path: Path) -> None:
    for alive, found, problems in ranks(2)(failing, str(tmp_path / "checkpoints")):
        assert alive == [] and found and not any("tmp" in name for name in found), found
        assert not problems
