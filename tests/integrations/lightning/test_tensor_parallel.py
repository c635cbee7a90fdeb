"""`parallelize_module` in `configure_model`, before Fabric's `setup`, and before `initialize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import zero_strategy
from tests.integrations.lightning.trainers import Module, Net, data, join, trainer, zero
from tests.launcher import Launcher
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.integrations import strategy_class

TENSOR = {"mesh": {"tensor": 2}}
CLOSE = {"rtol": 1e-5, "atol": 1e-4}
"""Adam makes much of the rounding of gradients near zero; other data or other ranks would be off by 0.02."""


def divide(net: Net, mesh: Any) -> None:
    parallelize_module(
        net,
        mesh,
        {
            "inner": ColwiseParallel(output_layouts=Replicate()),
            "blocks.0.0": ColwiseParallel(output_layouts=Replicate()),
            "blocks.1.0": RowwiseParallel(input_layouts=Replicate()),
        },
    )


class Divided(Module):
    """As users of Lightning's ModelParallelStrategy write it."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None and not isinstance(self.net.inner.weight, DTensor):
            divide(self.net, mesh["tensor_parallel"])


def samples(batch: int) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=batch)


def run_trainer(strategy: Any, folder: str, source: str | None, **flags: Any) -> tuple[dict[str, Tensor], float]:
    module = Divided()
    options = {"use_distributed_sampler": True, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    run = trainer(strategy, **options, **flags)
    run.fit(module, samples(4), samples(4), ckpt_path=source)
    loss = float(run.callback_metrics["val_loss"])
    zeroed: Any = run.strategy
    if zeroed.config.mesh.tensor is None:
        return zeroed.engine.full_state_dict(), loss
    assert isinstance(module.net.inner.weight, DTensor) and zeroed.engine.mesh.tensor.size == 2
    assert zeroed._resolve().facts["samples_per_step"].value == 16
    assert zeroed.distributed_sampler_kwargs["num_replicas"] == 2
    run.save_checkpoint(folder)
    return zeroed.engine.full_state_dict(), loss


def trainer_runs(folder: str) -> list[tuple[dict[str, Tensor], float]]:
    first = run_trainer(zero(3, **TENSOR), f"{folder}/first", None)
    # From there to the end of a second epoch, by an engine whose state is divided otherwise.
    return [first, run_trainer(zero(1, **TENSOR), f"{folder}/second", f"{folder}/first", max_epochs=2)]


def test_under_a_trainer(ranks: Launcher, tmp_path: Path) -> None:
    by_rank = ranks(4, timeout=180)(trainer_runs, str(tmp_path))
    expected = ranks(2)(undivided_runs)[0]  # Lightning's samplers shuffle: the same for as many copies
    for found in by_rank:
        for number, (state, val_loss) in enumerate(found):
            plain, loss = expected[number]
            assert val_loss == pytest.approx(loss, rel=1e-5)
            for name, value in state.items():
                torch.testing.assert_close(value, plain[name], **CLOSE, msg=name)


def undivided_runs() -> list[tuple[dict[str, Tensor], float]]:
    return [run_trainer(zero(0), "", None), run_trainer(zero(0), "", None, max_epochs=2)]


def other_faces() -> dict[str, Any]:
    """Three steps under Fabric, and by `initialize`, each rank with the samples of its copy."""
    join()
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy_class("lightning.fabric")(stage=2, **TENSOR))
    fabric.launch()
    strategy: Any = fabric.strategy
    mesh = strategy.device_mesh
    net = seeded_net()
    divide(net, mesh["tensor_parallel"])
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader: Any = fabric.setup_dataloaders(samples(4))
    for number, (x, y) in enumerate(loader):
        if number < 3:
            fabric.backward(F.mse_loss(model(x).squeeze(-1), y))
            optimizer.step()
            optimizer.zero_grad()
    of_fabric = strategy.engines[0].full_state_dict()

    net = seeded_net()
    divide(net, make_device_mesh("cpu", tensor=2)["tp"])
    config = {"stage": 3, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    engine, *_ = zero_strategy.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), config=config, training_data=data()
    )
    assert (engine.world_size, engine.gradient_accumulation_steps()) == (2, 1)
    loader = engine.deepspeed_io(data(), data_sampler=sampler(engine))
    for number, (x, y) in enumerate(loader):
        if number < 3:
            engine.backward(F.mse_loss(engine(x).squeeze(-1), y))
            engine.step()
    return {"fabric": of_fabric, "initialize": engine.zero.full_state_dict()}


def seeded_net() -> Net:
    torch.manual_seed(0)
    return Net()


def sampler(engine: Any) -> DistributedSampler[Any]:
    return DistributedSampler(data(), num_replicas=engine.world_size, rank=engine.global_rank, shuffle=False)


def test_tensor_parallel_fabric_and_scripts(ranks: Launcher) -> None:
    net = seeded_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number, (x, y) in enumerate(samples(8)):
        if number < 3:
            F.mse_loss(net(x).squeeze(-1), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(4)(other_faces):
        for state in found.values():
            for name, value in state.items():
                torch.testing.assert_close(value, net.state_dict()[name], **CLOSE, msg=name)
