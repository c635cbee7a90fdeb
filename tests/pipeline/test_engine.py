"""Pipelines under ZeRO: what they train is what one process trains, whatever the stages, schedules and copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launcher import Launcher
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.specs import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline_engine import PipelineEngine

VOCABULARY, LENGTH, WIDTH, STEPS, CLIP = 23, 6, 12, 3, 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def layers(tied: bool) -> list[Any]:
    middle: list[Any] = [*(LayerSpec(Block) for _ in range(6)), LayerSpec(nn.LayerNorm, WIDTH)]
    if not tied:
        return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    first = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
    return [first, *middle, TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batches(step: int, micro_batches: int, copy: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of one data-parallel copy; the last one is shorter."""
    for number in range(micro_batches):
        rows = 1 if number == micro_batches - 1 else 2
        seed = 1000 * step + 10 * number + copy
        tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        yield tokens[:, :-1], tokens[:, 1:]


class Case(NamedTuple):
    stages: int
    copies: int
    zero: int
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 3
    tied: bool = True
    gather: str = "per_micro_batch"


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def module_of(case: Case, **more: Any) -> PipelineModule:
    torch.manual_seed(0)
    shape: Any = "v" if case.schedule == "zbv" else "loop"
    return PipelineModule(
        layers(case.tied), case.stages, loss_fn=loss_of, chunks=case.chunks, placement=shape, **more
    )


def config_of(case: Case) -> dict[str, Any]:
    pipeline = {
        "stages": case.stages,
        "schedule": case.schedule,
        "chunks": case.chunks,
        "micro_batches": case.micro_batches,
        "gather": case.gather,
    }
    return {"stage": case.zero, "pipeline": pipeline}


def train(case: Case) -> Found:
    module = module_of(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, config_of(case))
    engine.attach(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        copy = module.mpu().data_parallel_id
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, copy))))
        norms.append(float(engine.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, engine.full_state_dict())


def train_cases(cases: list[Case]) -> list[Found]:
    return [train(case) for case in cases]


@functools.cache
def plain(copies: int, micro_batches: int, tied: bool) -> Found:
    """One process and no engine."""
    module = module_of(Case(1, 1, 0, tied=tied), rank=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for copy in range(copies):
            for inputs, labels in batches(step, micro_batches, copy):
                loss = loss_of(module(inputs), labels) / (micro_batches * copies)
                loss.backward()
                total += float(loss)
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})


def check(ranks: Launcher, cases: list[Case]) -> None:
    by_rank = ranks(cases[0].stages * cases[0].copies, timeout=180)(train_cases, cases)
    for number, case in enumerate(cases):
        expected = plain(case.copies, case.micro_batches, case.tied)
        for found in (results[number] for results in by_rank):
            assert found.losses == pytest.approx(expected.losses, rel=1e-6), case
            assert found.norms == pytest.approx(expected.norms, rel=1e-5), case
            assert found.weights.keys() == expected.weights.keys(), case
            for name, tensor in found.weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5, msg=f"{case} {name}")


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("interleaved_zb", 2), ("zbv", 2)]


@pytest.mark.parametrize("copies", [1, 2])
def test_every_stage_of_zero(ranks: Launcher, copies: int) -> None:
    plainly = [Case(2, copies, zero, tied=tied) for zero in range(4) for tied in (True, False)]
    check(ranks, [*plainly, Case(2, copies, 3, gather="per_step")])


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_every_schedule(ranks: Launcher, zero: int) -> None:
    check(ranks, [Case(2, 1, zero, schedule, chunks, 4) for schedule, chunks in SCHEDULES])
