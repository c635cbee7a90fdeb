"""Checkpoints where plain Lightning looks: `load_from_checkpoint` of a directory, and `checkpoint.format: file`."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import zero_strategy
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.lightning.test_fabric import fabric
from tests.integrations.lightning.test_fabric import zero as fabric_zero
from tests.integrations.lightning.trainers import Module, error, loader, raises, train, trainer, weights, zero
from tests.launcher import Launcher

CLOSE = 2e-6
FILE = {"format": "file"}


class Loads(zero_strategy.LoadsFromDirectory, Module):
    """Lines that a user adds to load by Lightning's own name."""


def told(module: Module, path: str) -> list[str]:
    """Messages of Lightning's logger at two saves."""
    logger, said = logging.getLogger("lightning.pytorch"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run = trainer("zero2")
        run.fit(module, loader())
        for number in range(2):
            run.save_checkpoint(f"{path}-{number}.ckpt")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [text for text in said if "is a directory" in text]


def load_directory(tmp: str) -> None:
    module, best = Loads(lr=2e-2), ModelCheckpoint(tmp, "{epoch}", monitor="loss")
    run = trainer(zero(3), max_epochs=2, callbacks=[best], enable_checkpointing=True)
    run.fit(module, loader())
    assert os.path.isdir(best.best_model_path)
    for path in (best.best_model_path, Path(best.best_model_path)):
        loaded = Loads.load_from_checkpoint(path)
        assert error(weights(loaded), weights(module)) == 0 and loaded.hparams["lr"] == 2e-2
        assert type(loaded) is Loads and Loads.load_from_checkpoint(path, momentum=0.5).hparams["momentum"] == 0.5
    strict = Loads.load_from_checkpoint(best.best_model_path, "cpu", None, True)
    assert error(weights(strict), weights(module)) == 0
    with raises(TypeError, "Loads.load_from_checkpoint() makes a new object"):
        loaded.load_from_checkpoint(best.best_model_path)
    with raises(FileNotFoundError, "nothing.ckpt"):
        Loads.load_from_checkpoint(f"{tmp}/nothing.ckpt")
    assert pickle.loads(pickle.dumps(Loads)) is Loads
    plain = trainer("auto", devices=1)
    if dist.get_rank() == 0:  # files load as ever
        plain.strategy.connect(Loads())
        plain.save_checkpoint(f"{tmp}/plain.ckpt")
        assert os.path.isfile(f"{tmp}/plain.ckpt")
        assert error(weights(Loads.load_from_checkpoint(f"{tmp}/plain.ckpt")), weights(Loads())) == 0
    dist.barrier()


def test_a_module_loads_directories_by_its_own_name(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(load_directory, str(tmp_path))


def say(tmp: str) -> list[list[str]]:
    return [told(Module(), f"{tmp}/a"), told(Loads(), f"{tmp}/b")]


def test_other_modules_are_told_the_call_once(ranks: Launcher, tmp_path: Path) -> None:
    (said, nothing), others = ranks(2)(say, str(tmp_path))
    assert len(said) == 1 and nothing == [] and others == [[], []]
    assert "a-0.ckpt is a directory" in said[0] and "zero_strategy.load_from_checkpoint(Module, path)" in said[0]


def single_files(tmp: str, stage: int) -> float:
    expected = train(Module(), None, max_epochs=2)
    best = ModelCheckpoint(tmp, "{epoch}", monitor="loss", save_top_k=1, save_last=True)
    module = Module()
    chosen = {"max_epochs": 1, "callbacks": [best], "enable_checkpointing": True}
    run = trainer(zero(stage, checkpoint=FILE), **chosen)
    run.fit(module, loader())
    assert sorted(os.listdir(tmp)) == ["epoch=0.ckpt", "last.ckpt"] and os.path.isfile(best.best_model_path)
    assert error(weights(Module.load_from_checkpoint(best.best_model_path)), weights(module)) == 0
    content = torch.load(best.best_model_path, weights_only=True)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "hyper_parameters"} <= set(content)
    for strategy in ("ddp", zero(3), zero(1, checkpoint=FILE)):
        resumed = Module()
        again = trainer(strategy, max_epochs=2)
        again.fit(resumed, loader(), ckpt_path=f"{tmp}/last.ckpt")
        assert error(weights(resumed), expected) < CLOSE and again.global_step == 8

    engine = run.strategy.engine
    assert engine.full_state_dict(keep=False) == {}
    assert engine.optimizer_state_dict(run.optimizers[0], keep=False) == {}
    # In the place of a directory of an earlier run, and not in that of anything else.
    old = trainer(zero(stage))
    old.fit(Module(), loader())
    old.save_checkpoint(f"{tmp}/old.ckpt")
    assert os.path.isdir(f"{tmp}/old.ckpt")
    run.save_checkpoint(f"{tmp}/old.ckpt")
    assert os.path.isfile(f"{tmp}/old.ckpt")
    os.makedirs(f"{tmp}/notes", exist_ok=True)
    Path(f"{tmp}/notes/mine.txt").write_text("mine")
    with raises((ValueError, RuntimeError), "notes exists and is not a checkpoint"):
        run.save_checkpoint(f"{tmp}/notes")
    with raises(ValueError, "storage_options"):
        run.save_checkpoint(f"{tmp}/x.ckpt", storage_options={"a": 1})
    dist.barrier()
    assert sorted(os.listdir(tmp)) == ["epoch=0.ckpt", "last.ckpt", "notes", "old.ckpt"]
    return error(weights(resumed), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_single_files(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    """With ModelCheckpoint, `load_from_checkpoint`, `torch.load`; resumed by DDP and by us; failures on all ranks."""
    assert max(ranks(2)(single_files, str(tmp_path), stage)) < CLOSE


def fabric_file(path: str) -> bool:
    run = fabric(fabric_zero(3, checkpoint=FILE))
    model = run.setup(torch.nn.Linear(4, 4))
    run.save(path, {"model": model, "step": 3})
    run.barrier()
    found = torch.load(path, weights_only=True)
    return found["step"] == 3 and found["model"]["weight"].shape == (4, 4)


def test_fabric_saves_single_files(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(fabric_file, str(tmp_path / "f.ckpt")) == [True, True]


def refused() -> None:
    with fresh_state(), raises(ValueError, "checkpoint.format='file'", "save_state writes directories"):
        zero_strategy.ZeroAccelerator(cpu=True, zero_config={"stage": 1, "checkpoint": FILE})


def test_accelerate_refuses_the_setting(ranks: Launcher) -> None:
    ranks(1)(refused)
