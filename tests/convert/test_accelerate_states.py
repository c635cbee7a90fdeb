"""State directories of Accelerate: made by it where it is installed, and in its layout by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.convert.foreign import check, step, trained
from zero_strategy.convert import accelerate
from zero_strategy.convert.convert import detect, open_any, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def lay_out(kind: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir()
    weights, states = get_state_dict(model, optimizer)
    if kind == "sharded":
        dcp.save({"model": weights}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": states}, checkpoint_id=path / "optimizer_0", no_dist=True)
    elif kind == "full":
        torch.save(weights, path / "pytorch_model_fsdp.bin")
        torch.save(states, path / "optimizer.bin")
    else:
        torch.save(optimizer.state_dict(), path / "optimizer.bin")
        if kind == "safetensors":
            save_model(model, str(path / "model.safetensors"))
        else:
            torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save({"last_epoch": 5}, path / "scheduler.bin")
    torch.save({"scale": 4.0, "_growth_tracker": 1}, path / "scaler.pt")
    torch.save({"mine": 7}, path / "custom_checkpoint_0.pkl")
    torch.save({"step": 3}, path / "random_states_0.pkl")


@pytest.mark.parametrize("kind", ["sharded", "full", "safetensors", "bin"])
def test_every_layout(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    lay_out(kind, tmp_path / "state", model, optimizer)
    found = detect(tmp_path / "state")
    assert found is not None and found.name == "accelerate"
    state = state_of(open_any(tmp_path / "state"))
    if kind == "safetensors":  # it holds a tied tensor once, and not under the first name
        tied = model.state_dict()["embed.weight"]
        (name,) = {"embed.weight", "head.weight"} & state.weights.keys()
        assert torch.equal(state.weights[name].load(), tied)
        assert "not in the model's order" in state.optimizers[0].unnamed
        order = {p: n for n, p in model.named_parameters()}
        names = [order[p] for group in optimizer.param_groups for p in group["params"]]
        named = state.optimizers[0].with_names(names, state.weights)
        for parameter, values in optimizer.state.items():
            assert torch.equal(named.kinds["exp_avg"][order[parameter]].load(), values["exp_avg"])
    else:
        check(state, model, optimizer, ties=kind != "sharded")
    assert state.lr_scheduler == {"last_epoch": 5} and state.client_state == {"custom_checkpoint_0": {"mine": 7}}
    assert state.loss_scaler is not None and state.loss_scaler["scale"] == 4.0


def test_accelerate_state_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    torch.save({}, tmp_path / "a" / "pytorch_model_fsdp_0_rank0.bin")
    assert accelerate.detect(tmp_path / "a")
    with pytest.raises(ValueError, match="files of one rank each"):
        accelerate.read(tmp_path / "a")
    model, optimizer = trained()
    lay_out("bin", tmp_path / "b", model, optimizer)
    torch.save({}, tmp_path / "b" / "pytorch_model_1.bin")
    with pytest.raises(ValueError, match="several models"):
        accelerate.read(tmp_path / "b")
    assert not accelerate.detect(tmp_path) and not accelerate.detect(tmp_path / "b" / "optimizer.bin")


def test_the_real_one(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("accelerate")
    model, optimizer = trained()
    accelerator = library.Accelerator(cpu=True)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    step(wrapped, prepared, 9)
    for safe in (True, False):
        accelerator.save_state(str(tmp_path / str(safe)), safe_serialization=safe)
        found = detect(tmp_path / str(safe))
        assert found is not None and found.name == "accelerate"
    check(accelerate.read(tmp_path / "False"), model, optimizer)
    # Accelerate keeps its state for the whole process, and tests after this one have other settings.
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    library.state.GradientState._reset_state()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_optimizer_state_is_read_without_random_states(tmp_path: Path, kind: str) -> None:
    lay_out(kind, tmp_path / "state", *trained())
    (tmp_path / "state" / "random_states_0.pkl").unlink()
    found = detect(tmp_path / "state")
    assert found is not None and found.name == "accelerate"
    assert len(state_of(open_any(tmp_path / "state")).optimizers) == 1


def test_optimizer_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    lay_out("sharded", tmp_path / "state", *trained())
    (tmp_path / "state" / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"state/optimizer_0: has no .metadata"):
        open_any(tmp_path / "state")
    lay_out("full", tmp_path / "two", *trained())
    (tmp_path / "two" / "optimizer.bin").rename(tmp_path / "two" / "optimizer_1.bin")
    with pytest.raises(ValueError, match=r"two/optimizer_1.bin: is there, and the state of optimizer 0"):
        open_any(tmp_path / "two")
