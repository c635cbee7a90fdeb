"""Lightning's own checkpoints: files of DDP by its Trainer, directories in the layout of its FSDP strategies."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback

from tests.integrations.lightning.trainers import Module, error, loader, train, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy.convert import lightning as interop
from zero_strategy.convert.convert import detect
from zero_strategy.convert.portable import loaded, write_portable

CLOSE = 2e-6


class Counting(Callback):
    """Counts batches over all runs."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def save_by_ddp(path: str) -> Module:
    """A checkpoint after one epoch, with the state of a callback and hyper-parameters in it."""
    module = Module()
    run = trainer("ddp", max_epochs=1, callbacks=[Counting()])
    run.fit(module, loader())
    run.save_checkpoint(path)
    return module


def as_fsdp_directory(file: str, path: str, module: Module, model_key: str) -> None:
    """Files of FSDPStrategy and ModelParallelStrategy with sharded states, one rank having it all."""
    checkpoint = torch.load(file, weights_only=False)
    names = [name for group in named_groups(module) for name in group]
    content: dict[str, Any] = {model_key: checkpoint.pop("state_dict")}
    for number, state in enumerate(checkpoint.pop("optimizer_states")):
        content[f"optimizer_{number}"] = {
            "state": {names[i]: values for i, values in state["state"].items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]],
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=path, no_dist=True)
    torch.save(checkpoint, os.path.join(path, "meta.pt"))


def named_groups(module: Module) -> list[list[str]]:
    names = {p: name for name, p in module.named_parameters()}
    return [[names[p] for p in group["params"]] for group in module.configure_optimizers()["optimizer"].param_groups]


def resume(tmp: str, kind: str) -> dict[str, Any]:
    file, path = os.path.join(tmp, "run.ckpt"), os.path.join(tmp, "directory.ckpt")
    first = save_by_ddp(file)
    if dist.get_rank() == 0 and kind != "file":
        as_fsdp_directory(file, path, first, kind)
    dist.barrier()
    path = file if kind == "file" else path
    module = Module()
    callback = Counting()
    run = trainer(zero(3), max_epochs=2, callbacks=[callback])
    run.fit(module, loader(), ckpt_path=path)
    return {
        "trained": error(weights(module), train(Module(), None, max_epochs=2)),
        "steps": (run.global_step, run.current_epoch),
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "seen": callback.seen,
    }


@pytest.mark.parametrize("kind", ["model", "state_dict"])
def test_fit_goes_on_from_a_directory_of_fsdp(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    for found in ranks(2)(resume, str(tmp_path), kind):
        assert found["trained"] < CLOSE
        assert found["steps"] == (8, 2)
        assert found["lr"] == pytest.approx(1e-2 / (1 + 0.1 * 8))
        assert found["seen"] == 8


def make(tmp: str) -> dict[str, torch.Tensor]:
    module = save_by_ddp(os.path.join(tmp, "run.ckpt"))
    if dist.get_rank() == 0:
        as_fsdp_directory(os.path.join(tmp, "run.ckpt"), os.path.join(tmp, "directory.ckpt"), module, "model")
    return weights(module)


def resume_converted(path: str) -> tuple[float, int]:
    module = Module()
    run = trainer(zero(1), max_epochs=2)
    run.fit(module, loader(), ckpt_path=path)
    return error(weights(module), train(Module(), None, max_epochs=2)), run.global_step


def test_both_kinds_convert(ranks: Launcher, tmp_path: Path) -> None:
    expected = ranks(2)(make, str(tmp_path))[0]
    states = torch.load(tmp_path / "run.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    names = [name for group in named_groups(Module()) for name in group]
    for name in ("run.ckpt", "directory.ckpt"):
        found = detect(tmp_path / name)
        assert found is not None and found.name == "lightning"
        state = interop.read(tmp_path / name)
        assert state.weights.keys() == expected.keys()
        assert all(torch.equal(loaded(state.weights[key]), tensor) for key, tensor in expected.items())
        (optimizer,) = state.optimizers
        if optimizer.unnamed:  # layers of equal shapes; the user knows the order
            optimizer = state.optimizers[0] = optimizer.with_names(names, state.weights)
        for number, key in enumerate(names):
            assert torch.equal(loaded(optimizer.kinds["exp_avg"][key]), states[number]["exp_avg"])
        assert state.counters == {"global_steps": 4} and state.lr_scheduler is not None
        assert state.user["lightning"]["global_step"] == 4
        write_portable(state, tmp_path / f"ours-{name}")
        for difference, steps in ranks(2)(resume_converted, str(tmp_path / f"ours-{name}")):
            assert difference < CLOSE and steps == 8


class Odd:
    """Hyper-parameters may be of any class."""


def test_foreign_checkpoint_hyper_parameters_that_are_not_plain_data(tmp_path: Path) -> None:
    content = {"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6.0"}
    torch.save({**content, "hyper_parameters": {"a": Odd()}}, tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"run.ckpt.*Odd"):
        interop.read(tmp_path / "run.ckpt")
