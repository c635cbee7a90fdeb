"""Pipelines whose stages have divided experts, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.experts.model import WIDTH, Block, batch
from tests.launcher import Launcher
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule

MICRO_BATCHES, STEPS = 4, 3


def build() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double(), *(Block().double() for _ in range(3)), nn.Linear(WIDTH, 1).double()]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs.squeeze(-1) - labels) ** 2).mean()


def pairs(rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    found = [batch(rank, MICRO_BATCHES * step + number) for number in range(MICRO_BATCHES)]
    return [(x, x.sum(dim=-1)) for x in found]


def alone(copies: int) -> dict[str, Tensor]:
    model = nn.Sequential(*build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for rank in range(copies):
            for x, labels in pairs(rank, step):
                (loss_of(model(x), labels) / MICRO_BATCHES / copies).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def piped(config: dict[str, Any]) -> dict[str, Tensor]:
    module = PipelineModule(build(), 2, loss_fn=loss_of)
    engine = PipelineEngine(module, {**config, "pipeline": {"stages": 2, "micro_batches": MICRO_BATCHES}})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    engine.attach(optimizer)
    copy_number = module.mpu().get_data_parallel_rank()
    for step in range(STEPS):
        engine.forward_backward(iter(pairs(copy_number, step)))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value for name, value in engine.full_state_dict().items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    engine.close()
    return {name: value for each in everyone for name, value in each.items()}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_with_divided_experts(ranks: Launcher, stage: int) -> None:
    wanted = alone(2)
    found = ranks(4)(piped, {"stage": stage, "mesh": {"expert": 2}})[0]
    assert len(found) == len(wanted)
    for one, other in zip(sorted(found), sorted(wanted), strict=True):
        assert float((found[one] - wanted[other]).abs().max()) < 1e-12
