"""The engine on one CUDA device, through the same code as on the CPU."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine.nets import net
from tests.models import build, loss_fn, make_batch, param_groups
from tests.publish.test_publish import assert_shown
from zero_strategy import subscribe
from zero_strategy.engine import ZeroEngine

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A world of one NCCL rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_trains_like_plain_torch(nccl: object, stage: int) -> None:
    """Losses of ten steps equal plain torch's on the same device."""
    model = build("transformer").cuda()
    plain = copy.deepcopy(model)
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 0}})
    optimizers = [torch.optim.AdamW(param_groups(m), foreach=False) for m in (model, plain)]
    engine.attach(optimizers[0])
    for step in range(10):
        batch = make_batch("transformer", step, 4)
        batch = type(batch)(batch.inputs.cuda(), batch.targets.cuda())
        losses = []
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            loss = loss_fn(module, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_released_memory_is_given_back(nccl: object) -> None:
    """Between steps a stage-3 model allocates its shards and nothing else."""
    gc.collect()
    before = torch.cuda.memory_allocated()  # also what cuBLAS keeps for itself
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    engine = ZeroEngine(model, {"stage": 3})
    torch.cuda.synchronize()
    expected = engine.state_bytes()["parameters"]
    assert torch.cuda.memory_allocated() - before <= expected * 1.05 + (1 << 20)


@pytest.mark.parametrize("stage", [1, 3])
def test_published_weights_are_those_of_the_device(nccl: object, tmp_path: Path, stage: int) -> None:
    model = net(width=64).cuda()
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 1}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    published, reader = engine.publish(tmp_path), subscribe(tmp_path)
    for step in range(4):
        published.update()
        assert reader.update()
        assert_shown(reader.tensors, {name: value.cpu() for name, value in engine.full_state_dict().items()})
        chance = torch.Generator("cuda").manual_seed(step)
        model(torch.randn(8, 64, device="cuda", generator=chance)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
