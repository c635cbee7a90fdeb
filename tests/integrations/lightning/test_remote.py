"""The Trainer, Fabric and the engine with checkpoints at URLs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("fsspec")

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.object_store import register
from tests.integrations.lightning.trainers import Module, error, loader, train, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.config import load_config
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine

CLOSE = 2e-6


def fit_to(folder: str) -> dict[str, Any]:
    first, second = Module(), Module()
    every = {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "step", "mode": "max"}
    callback = ModelCheckpoint(dirpath=folder, filename="{step}", **every)
    run = trainer(zero(3), max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=True, callbacks=[callback])
    run.fit(first, loader())
    again = trainer(zero(1), max_epochs=2, accumulate_grad_batches=2)
    again.fit(second, loader(), ckpt_path=callback.best_model_path)
    whole = train(Module(), None, max_epochs=2, accumulate_grad_batches=2)
    return {"best": callback.best_model_path, "trained": error(weights(second), whole), "step": again.global_step}


def fit_to_bucket(root: str) -> dict[str, Any]:
    url = register(Path(root))
    found = fit_to(url)
    assert isinstance(open_any(found["best"]), PieceReader)
    return found


def test_model_checkpoint_in_an_object_store(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(fit_to_bucket, str(tmp_path)):
        assert found["best"].startswith("bucket://run/") and found["trained"] < CLOSE and found["step"] == 4
    assert len([path for path in (tmp_path / "run").iterdir() if path.is_dir()]) == 2  # save_top_k


def engine_at_a_url(root: str) -> None:
    url = register(Path(root))
    model = torch.nn.Linear(7, 5)
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}, checkpoint={"keep_last": 2}))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    for step in range(4):
        model(torch.full((2, 7), 1.0 + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saving = engine.save_checkpoint(url, client_state={"step": step}, asynchronous=True)
        saving.wait()
    saving.finish()  # what is no longer kept is removed after `wait`
    trained = engine.full_state_dict()
    other = torch.nn.Linear(7, 5)
    resumed = ZeroEngine(other, load_config(stage=2, units={"min_numel": 0}))
    resumed.attach(torch.optim.AdamW(other.parameters()))
    path, state = resumed.load_checkpoint(url)
    assert (path, state) == (f"{url}/global_step4", {"step": 3})
    assert all(torch.equal(value, trained[name]) for name, value in resumed.full_state_dict().items())
    with pytest.warns(UserWarning, match="no checkpoint found"):
        assert resumed.load_checkpoint(f"{url}/nothing") == (None, {})
    if dist.get_rank() == 0:
        (Path(root) / "run/logs").mkdir()
        (Path(root) / "run/logs/train.log").write_text("epoch 0")
    resumed.mesh.barrier.wait_for_all("a log is there")
    with pytest.warns(UserWarning, match="no checkpoint found"):
        assert resumed.load_checkpoint(f"{url}/logs") == (None, {})
    resumed.mesh.barrier.wait_for_all("looked")
    if dist.get_rank() == 0:
        shutil.rmtree(Path(root) / "run/logs")
        (Path(root) / "run/latest").rename(Path(root) / "run/kept")
    resumed.mesh.barrier.wait_for_all("hidden")
    with pytest.warns(UserWarning, match="has no latest; taking global_step4, the newest checkpoint there"):
        assert resumed.load_checkpoint(url)[0] == f"{url}/global_step4"
    resumed.mesh.barrier.wait_for_all("loaded")
    if dist.get_rank() == 0:
        (Path(root) / "run/kept").rename(Path(root) / "run/latest")


def test_the_engine_saves_to_a_url_by_tag(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(engine_at_a_url, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["global_step3", "global_step4", "latest"]
