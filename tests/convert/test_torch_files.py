"""Files of torch.save, in and out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.convert.foreign import adamw, build, check, our_checkpoint, step, trained
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.convert import torch_file
from zero_strategy.convert.convert import detect, open_any, state_of
from zero_strategy.convert.portable import portable_of, write_portable


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, foreach=False)


def with_names(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9, foreach=False)


@pytest.mark.parametrize("make", [adamw, one_group, with_names])
@pytest.mark.parametrize("keys", [("model", "optimizer"), ("state_dict", "optimizer_states"), ("module", "optimizers")])
def test_what_scripts_write(tmp_path: Path, make: Any, keys: tuple[str, str]) -> None:
    model, optimizer = trained(make)
    states: Any = optimizer.state_dict() if keys[1] == "optimizer" else [optimizer.state_dict()]
    rest = {"global_step": 3, "scheduler": {"last_epoch": 2}, "note": "x"}
    content = {keys[0]: model.state_dict(), keys[1]: states, **rest}
    torch.save(content, tmp_path / "file.pt")
    found = detect(tmp_path / "file.pt")
    assert found is not None and found.name == "torch"
    state = torch_file.read(tmp_path / "file.pt")
    check(state, model, optimizer)
    assert state.counters["global_steps"] == 3 and state.lr_scheduler == {"last_epoch": 2}
    assert state.client_state == {"global_step": 3, "note": "x"}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_plain_state_dict_with_wrappers_names(tmp_path: Path, zipped: bool) -> None:
    model, _ = trained()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(wrapped, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    assert torch_file.detect(tmp_path / "file.pt")
    check(torch_file.read(tmp_path / "file.pt"), model, None)
    kept = torch_file.read(tmp_path / "file.pt", prefix="")
    assert next(iter(kept.weights)) == "module.unused"


def test_torch_file_out_and_in_again(tmp_path: Path) -> None:
    model, optimizer = trained()
    rest: dict[str, Any] = {"counters": {"global_steps": 3}, "client_state": {"seen": 9}, "user": {"k": (1,)}}
    rest |= {"lr_scheduler": {"last_epoch": 1}, "extra_files": {"a/b.bin": b"\0"}}
    state = our_checkpoint(model, optimizer, tmp_path / "ours", **rest)
    torch_file.write(state, tmp_path / "file.pt")
    again = torch_file.read(tmp_path / "file.pt")
    check(again, model, optimizer)
    for key in (*rest, "loss_scaler"):
        assert getattr(again, key) == getattr(state, key), key
    assert sorted(os.listdir(tmp_path)) == ["file.pt", "ours"]

    content = torch.load(tmp_path / "file.pt", weights_only=True)
    plain, other = build(seed=1), None
    plain.load_state_dict(content["model"])
    other = adamw(plain)
    other.load_state_dict(content["optimizers"][0])
    assert [step(plain, other, n) for n in (3, 4)] == [step(model, optimizer, n) for n in (3, 4)]


def test_master_weights_come_back(tmp_path: Path) -> None:
    from tests.checkpoint.saving import same, save
    from tests.convert.test_portable import ADAM, MODEL, RECORDS

    save(tmp_path / "c", MODEL, {"0": ADAM}, manifest=RECORDS)
    torch_file.write(portable_of(CheckpointReader(tmp_path / "c")), tmp_path / "file.pt")
    again = state_of(open_any(tmp_path / "file.pt"))
    for kind, tensors in ADAM.items():
        for name, tensor in tensors.items():
            assert same(again.optimizers[0].kinds[kind][name].load(), tensor)
    assert again.optimizers[0].scalars == RECORDS["scalars"]["0"]


def test_groups_that_shapes_do_not_tell_apart(tmp_path: Path) -> None:
    def by_layer(model: nn.Module) -> torch.optim.Optimizer:
        layers: Any = model.layers
        return torch.optim.AdamW([{"params": [layers[1].weight]}, {"params": [layers[0].weight]}], foreach=False)

    model, optimizer = trained(by_layer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    state = torch_file.read(tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"optimizer\[0\]: .* not certain: the shapes fit in several ways"):
        write_portable(state, tmp_path / "ours")
    (unnamed,) = state.optimizers
    assert [group["params"] for group in unnamed.param_groups] == [["#0"], ["#1"]]
    with pytest.raises(ValueError, match="of 2 parameters, 1 names"):
        unnamed.with_names(["unused"], state.weights)
    with pytest.raises(ValueError, match=r"in the place of parameter 'unused' has the shape \(6, 6\).*another order"):
        unnamed.with_names(["unused", "layers.0.weight"], state.weights)
    state.optimizers = [unnamed.with_names(["layers.1.weight", "layers.0.weight"], state.weights)]
    check(state, model, optimizer)
    check(torch_file.read(tmp_path / "file.pt", weights_only=True), model, None)


def test_torch_file_what_cannot_be_read(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "no_model.pt")
    with pytest.raises(ValueError, match=r"no state dict found.*\['epoch'\]"):
        torch_file.read(tmp_path / "no_model.pt")
    torch.save({"model": build().state_dict(), "args": Path}, tmp_path / "objects.pt")
    with pytest.raises(ValueError, match=r"pathlib"):
        torch_file.read(tmp_path / "objects.pt")
    (tmp_path / "text.pt").write_text("hello")
    assert not torch_file.detect(tmp_path / "text.pt") and not torch_file.detect(tmp_path)


def test_torch_file_extra_state_of_modules(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 4}

    model = nn.Sequential(Counting(2, 2))
    torch.save(model.state_dict(), tmp_path / "file.pt")
    state = torch_file.read(tmp_path / "file.pt")
    assert state.weights.keys() == {"0.weight", "0.bias"}
    assert torch_file.to_content(state)["model"]["0._extra_state"] == {"calls": 4}
