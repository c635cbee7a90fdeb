"""Float8 layers whose model is divided otherwise, too: among tensor-parallel ranks, and among pipeline stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import convert_to_float8_training

from tests.engine.float8 import WIDTH, Block, in_blocks, plain_net, recipe
from tests.launcher import Launcher
from zero_strategy import PipelineEngine, ZeroEngine
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.pipeline.module import PipelineModule

STEPS, MICRO_BATCHES = 3, 3


def data(number: int, width: int) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(number))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def tensor_parallel(stage: int | None, name: str) -> list[float]:
    """Losses; with stage None, of one process."""
    model = plain_net()
    convert_to_float8_training(model, module_filter_fn=in_blocks, config=recipe(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if stage is not None:
        mesh = make_device_mesh("cpu", tensor=2)["tp"]
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = ZeroEngine(model, {"stage": stage, "mesh": {"tensor": 2}, "units": {"min_numel": 0}})
        engine.attach(optimizer)
    losses = []
    for step in range(STEPS):
        loss = square(model(data(step, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_layers_that_ranks_divide_scale_as_whole_ones(ranks: Launcher, name: str) -> None:
    expected = tensor_parallel(None, name)
    for stage in (1, 3):
        for found in ranks(2)(tensor_parallel, stage, name):
            assert found == pytest.approx(expected, abs=1e-7)


def blocks() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(*(Block() for _ in range(4)))
    convert_to_float8_training(made, config=recipe("tensorwise"))
    return list(made)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def pipeline(stage: int, schedule: str) -> tuple[list[float], list[Tensor]]:
    module = PipelineModule(blocks(), 2, loss_fn=loss_fn)
    split = {"stages": 2, "schedule": schedule, "micro_batches": MICRO_BATCHES}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, foreach=False)
    engine = PipelineEngine(module, {"stage": stage, "pipeline": split, "fused_optimizers": False})
    engine.attach(optimizer)
    losses = []
    for step in range(STEPS):
        micro = [data(10 * step + number, WIDTH) for number in range(MICRO_BATCHES)]
        losses.append(float(engine.forward_backward(iter([(x, x.cos()) for x in micro]))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, list(engine.full_state_dict().values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_of_pipelines(ranks: Launcher, schedule: str) -> None:
    """A micro-batch scales its own rows; a zero-bubble schedule takes the weight's gradient with the input's."""
    model = nn.Sequential(*blocks())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False), []
    for step in range(STEPS):
        total = 0.0
        for number in range(MICRO_BATCHES):
            x = data(10 * step + number, WIDTH)
            loss = loss_fn(model(x), x.cos()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    expected = list(model.state_dict().values())
    for found, weights in ranks(2)(pipeline, 1, schedule):
        assert found == pytest.approx(losses, abs=1e-6)
        assert all(float((a - b).abs().max()) < 1e-6 for a, b in zip(weights, expected, strict=True))
