"""Scripts that run under DeepSpeed: arguments beside a config, parts that are trained, evaluation, frozen weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.compat.scripts.old_script import data, net
from tests.launcher import Launcher
from tests.warm import run_warm
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **more}


def train(engine: ScriptEngine, steps: int = 2) -> None:
    for x, y in list(engine.deepspeed_io(data()))[:steps]:
        engine.backward(engine(x, y))
        engine.step()


def test_an_optimizer_object_wins_over_the_config_s() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with pytest.warns(UserWarning, match="config's optimizer 'AdamW' has no effect"):
        engine, used, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(1, **ADAM))
    assert used is optimizer and engine.get_lr() == [5e-3]
    train(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_the_optimizer_leaves_out_stay(stage: int) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=5e-3)
    with pytest.warns(UserWarning, match=r"trainable parameter\(s\) of model_parameters are in no group of the AdamW"):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config(stage)
        )
    train(engine)
    changed = {name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}


def of_two_ranks(offload: bool) -> float:
    parameters = {"offload_param": {"device": "cpu"}} if offload else {}
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config(3, **ADAM, zero_optimization={"stage": 3, **parameters}),
    )
    train(engine)
    return float(sum(value.double().abs().sum() for value in engine.state_dict().values()))


def test_parameters_alone_may_be_offloaded(ranks: Launcher) -> None:
    assert ranks(2)(of_two_ranks, True) == pytest.approx(ranks(2)(of_two_ranks, False), rel=1e-6)


@pytest.mark.parametrize("zero", [{"stage": 3, "offload_param": {"device": "cpu"}}, {"stage": 3}, {"stage": 0}])
def test_evaluation_without_an_optimizer(zero: dict[str, Any]) -> None:
    x, y = data()[:4]
    expected = net()(x, y)
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config(3, zero_optimization=zero))
    engine.eval()
    with torch.no_grad():
        assert optimizer is None and torch.allclose(engine(x, y), expected)
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step()


def frozen(model: nn.Module) -> nn.Module:
    model.stem.requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_may_be_left_out(tmp_path: Path, stage: int) -> None:
    def start() -> ScriptEngine:
        model = frozen(net())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return deepspeed.initialize(model=model, model_parameters=trained, config=config(stage, **ADAM))[0]

    engine = start()
    train(engine)
    engine.save_checkpoint(tmp_path, tag="whole")
    assert engine.save_checkpoint(tmp_path, tag="part", exclude_frozen_parameters=True)
    sizes = {tag: sum(f.stat().st_size for f in (tmp_path / tag).rglob("*.safetensors")) for tag in ("whole", "part")}
    stem = sum(parameter.numel() * 4 for parameter in net().stem.parameters())
    assert sizes["whole"] - sizes["part"] >= stem
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    other = start()
    path, _ = other.load_checkpoint(tmp_path)
    assert path is not None and path.endswith("part") and other.global_steps == 2
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


RANK = """
import sys, torch
from datetime import timedelta
import zero_strategy.compat.deepspeed as deepspeed
rank, port, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deepspeed.init_distributed("gloo", rank=rank, world_size=2, init_method=file or None, distributed_port=int(port))
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
print(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), total.item())
"""


@pytest.mark.parametrize("by_file", [True, False])
def test_ranks_may_be_said(tmp_path: Path, by_file: bool) -> None:
    file = f"file://{tmp_path}/meet" if by_file else ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda rank: run_warm(RANK, str(rank), port, file, cwd=tmp_path), range(2))
        found = [done.stdout.splitlines()[-1:] or done.stderr for done in both]
    assert found == [["0 2 2.0"], ["1 2 2.0"]]


def test_ranks_that_do_not_fit() -> None:
    for rank, world in ((2, 2), (0, -1), (-1, 2)):
        with pytest.raises(ValueError, match=f"rank is {rank} and world_size {world}"):
            deepspeed.init_distributed("gloo", rank=rank, world_size=world)


def test_a_module_list_is_a_sequence_of_layers() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    losses = []
    for kind in (nn.ModuleList, lambda layers: nn.Sequential(*layers)):
        torch.manual_seed(0)
        layers = kind([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)])
        model = deepspeed.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(model=model, config=config(1, **ADAM))
        batch = iter([(torch.ones(2, 4), torch.zeros(2, 2))])
        losses.append(engine.train_batch(batch).item())
        assert set(engine.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        engine.destroy()
    assert losses[0] == losses[1]
