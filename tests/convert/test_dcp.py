"""Directories of torch.distributed.checkpoint, in and out, made and read by torch itself."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.saving import same, save
from tests.convert.foreign import adamw, build, check, our_checkpoint, step, trained
from tests.convert.test_portable import ADAM, MODEL, RECORDS
from tests.launcher import Launcher
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.convert import dcp as interop
from zero_strategy.convert.convert import detect
from zero_strategy.convert.portable import loaded, portable_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("names", [("model", "optimizer"), ("app.model", "app.optim")])
def test_dcp_one_process(tmp_path: Path, names: tuple[str, str], flat: bool) -> None:
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    content: dict[str, Any] = {names[0].rpartition(".")[2]: weights, names[1].rpartition(".")[2]: states, "step": 3}
    dcp.save({"app": content} if "." in names[0] else content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = detect(tmp_path / "dcp")
    assert found is not None and found.name == "dcp"
    state = interop.read(tmp_path / "dcp")
    if flat:  # the order of groups' parameters is not stored, and unused ones are in none
        moments, by_name = state.optimizers[0].kinds["exp_avg"], dict(model.named_parameters())
        assert moments and all(same(loaded(m), optimizer.state[by_name[n]]["exp_avg"]) for n, m in moments.items())
        assert sorted(g["weight_decay"] for g in state.optimizers[0].param_groups) == [0.0, 0.1]
        check(state, model, None, ties=False)
    else:
        check(state, model, optimizer, ties=False)
    assert state.counters == {"global_steps": 3}


def test_an_optimizer_without_state(tmp_path: Path) -> None:
    model, optimizer = trained(sgd)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check(interop.read(tmp_path / "dcp"), model, optimizer, ties=False)
    check(interop.read(tmp_path / "dcp", weights_only=True), model, None, ties=False)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_sharded(kind: str, directory: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Trains and saves as users of FSDP2 do; returns the full weights and optimizer state."""
    torch.set_num_threads(1)
    model: Any = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (number + 1) / 7)
    if kind == "fsdp2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for number in range(2):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory)
    names = {p: name.removeprefix("_fsdp_wrapped_module.") for name, p in model.named_parameters()}
    shapes = [(5, 5), (5,)] * 3
    moments = {
        name: {key: gathered(optimizer.state[p].get(key, torch.empty(0)), shape) for key in ("exp_avg", "exp_avg_sq")}
        for (p, name), shape in zip(names.items(), shapes, strict=True)
    }
    return {name: gathered(p, shape) for (p, name), shape in zip(names.items(), shapes, strict=True)}, moments


def gathered(value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A full tensor of a DTensor, or of FSDP1's flat pieces on the ranks."""
    if isinstance(value, DTensor):
        return whole(value).detach().clone()
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, value.detach().clone())
    return torch.cat(pieces).view(shape)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_dcp_two_ranks(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    weights, states = ranks(2)(save_sharded, kind, str(tmp_path / "dcp"))[0]
    state = interop.read(tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("__1_*"))) == 1  # rank 1 wrote its part
    assert state.weights.keys() == weights.keys() and len(weights) == 6
    assert all(same(loaded(state.weights[name]), tensor) for name, tensor in weights.items())
    (optimizer,) = state.optimizers
    for name, values in states.items():
        assert same(loaded(optimizer.kinds["exp_avg"][name]), values["exp_avg"])
        assert same(loaded(optimizer.kinds["exp_avg_sq"][name]), values["exp_avg_sq"])
        assert optimizer.scalars[name]["step"] == 2
    assert optimizer.param_groups[0]["params"] == list(weights) and optimizer.param_groups[0]["lr"] == 0.01


def test_what_is_written_loads_in_plain_torch(tmp_path: Path) -> None:
    def all_used(model: nn.Module) -> torch.optim.Optimizer:
        model.unused.requires_grad_(False)  # type: ignore[union-attr]
        return adamw(model)

    model, optimizer = trained(all_used)
    state = our_checkpoint(model, optimizer, tmp_path / "ours", counters={"global_steps": 3})
    moved: list[int] = []
    interop.write(state, tmp_path / "dcp", progress=moved.append)
    assert sum(moved) >= sum(tensor.spec.nbytes for _, tensor in state.tensors())
    other = build(seed=1)
    other.unused.requires_grad_(False)
    resumed = adamw(other)
    weights, states = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=states)
    assert [step(other, resumed, n) for n in (3, 4)] == [step(model, optimizer, n) for n in (3, 4)]


def load_sharded(directory: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A fresh FSDP2 model loads a directory by plain dcp.load."""
    model: Any = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=False)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: {key: whole(item) for key, item in values.items()} for p, values in optimizer.state.items()}
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}, found


def test_what_is_written_loads_in_two_ranks_of_fsdp(ranks: Launcher, tmp_path: Path) -> None:
    run = ranks(2)
    weights, states = run(save_sharded, "fsdp2", str(tmp_path / "theirs"))[0]
    interop.write(interop.read(tmp_path / "theirs"), tmp_path / "ours")
    for again, moments in run(load_sharded, str(tmp_path / "ours")):
        assert all(same(again[name], tensor) for name, tensor in weights.items())
        assert all(same(moments[n][key], item) for n, values in states.items() for key, item in values.items())


def test_dcp_out_and_in_again(tmp_path: Path) -> None:
    rest: dict[str, Any] = {"client_state": {"seen": [1, {"x": torch.ones(2)}]}, "lr_scheduler": {"last_epoch": 1}}
    save(tmp_path / "c", MODEL, {"0": ADAM, "1": {"exp_avg": ADAM["exp_avg"]}}, manifest=RECORDS)
    state = portable_of(CheckpointReader(tmp_path / "c"))
    state.client_state, state.lr_scheduler = rest["client_state"], rest["lr_scheduler"]
    state.optimizers[1].param_groups = [{"lr": 0.5, "params": ["half", "full", "last"]}]
    interop.write(state, tmp_path / "dcp")
    again = interop.read(tmp_path / "dcp")
    assert [tensor.spec for tensor in again.weights.values()] == [tensor.spec for tensor in state.weights.values()]
    assert all(same(loaded(again.weights[name]), tensor) for name, tensor in MODEL.items())
    for kind, tensors in ADAM.items():
        for name, tensor in tensors.items():
            assert same(loaded(again.optimizers[0].kinds[kind][name]), tensor)
    assert again.optimizers[0].scalars == RECORDS["scalars"]["0"]
    assert again.optimizers[0].param_groups == RECORDS["param_groups"]["0"]
    assert again.optimizers[1].param_groups == state.optimizers[1].param_groups
    assert again.counters == state.counters and again.user == state.user and again.loss_scaler == state.loss_scaler
    assert again.lr_scheduler == rest["lr_scheduler"] and torch.equal(again.client_state["seen"][1]["x"], torch.ones(2))
    with pytest.raises(ValueError, match="exists; it will not be overwritten"):
        interop.write(state, tmp_path / "dcp")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_dcp_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, harm, message in [
        ("missing", lambda d: (d / "__0_0.distcp").unlink(), "file __0_0.distcp is missing"),
        ("short", lambda d: (d / "__0_0.distcp").write_bytes((d / "__0_0.distcp").read_bytes()[:-1]), "is truncated"),
        ("evil", lambda d: (d / ".metadata").write_bytes(pickle.dumps(Evil())), "print"),
        ("other", lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})), "is no metadata of torch"),
        ("cut", lambda d: (d / ".metadata").write_bytes((d / ".metadata").read_bytes()[:-9]), "damaged"),
    ]:
        shutil.copytree(tmp_path / "dcp", tmp_path / name)
        harm(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            interop.read(tmp_path / name)
    assert "executed" not in capsys.readouterr().out
