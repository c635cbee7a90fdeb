"""Measurements for the fit, on gloo ranks of this machine: collectives by size, and steps by number of units.

A step's parts are measured in the same processes, by themselves but on all ranks at once: forward and backward of the
model without an engine, and torch's fused AdamW on as many elements as a rank owns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from benchmarks.scale.fitting import KINDS, CollectiveTime, StepTime
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

_VOCABULARY = 2048


@dataclass(frozen=True)
class MeasurePlan:
    """Subject of the measurement.

    Attributes:
        nbytes: Sizes of collectives; multiples of 4 x ranks.
        repeats: Of each collective.
        depths: Blocks of the models.
        width: Of the models.
        rows: Of a batch.
        length: Tokens of a row.
        stages: Of ZeRO.
        steps: Of each model and stage.
    """

    nbytes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    repeats: int = 9
    depths: tuple[int, ...] = (2, 4, 8)
    width: int = 256
    rows: int = 2
    length: int = 32
    stages: tuple[int, ...] = (1, 2, 3)
    steps: int = 5


@dataclass(frozen=True)
class Measured:
    """On one number of ranks: collectives of this package's engine, those of gloo itself, and steps."""

    collectives: list[CollectiveTime]
    gloo: list[CollectiveTime]
    steps: list[StepTime]


def measure(plan: MeasurePlan) -> Measured:
    """On every rank; all return the same."""
    torch.set_num_threads(1)
    ours = Communicator(dist.new_group(), CommunicationCounters())
    collectives, gloo = [], []
    for nbytes in plan.nbytes:
        flat = torch.ones(nbytes // 4)
        for kind in KINDS:
            collectives.append(_collective(kind, flat, plan.repeats, _by_engine(ours, kind, flat)))
            gloo.append(_collective(kind, flat, plan.repeats, _by_gloo(kind, flat)))
    ours.close()
    return Measured(collectives, gloo, [one for depth in plan.depths for one in _steps(depth, plan)])


def _collective(kind: str, flat: Tensor, repeats: int, run: Callable[[], object]) -> CollectiveTime:
    return CollectiveTime(kind, dist.get_world_size(), 4 * flat.numel(), slowest(run, repeats))


def _by_engine(group: Communicator, kind: str, flat: Tensor) -> Callable[[], object]:
    if kind == "all_reduce":
        return lambda: group.all_reduce(flat).wait()
    begin = group.all_gather if kind == "all_gather" else group.reduce_scatter
    return lambda: begin(flat).wait()


def _by_gloo(kind: str, flat: Tensor) -> Callable[[], object]:
    own = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(flat, own)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(own, flat)
    return lambda: dist.all_reduce(flat)


def slowest(run: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    """The least of the seconds of the slowest rank, all beginning together: what else the machine does only adds."""
    seconds = []
    for _ in range(warmup + repeats):
        dist.barrier()
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    found = torch.tensor(seconds[warmup:], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return min(float(value) for value in found)


def _steps(depth: int, plan: MeasurePlan) -> list[StepTime]:
    """One model, at every stage."""
    tokens = torch.randint(_VOCABULARY, (plan.rows, plan.length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = _model(depth, plan)
    parameters, world = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    forward, backward = _passes(model, inputs, targets, plan.steps)
    optimizer = _update(parameters // world, plan.steps)
    found = []
    for stage in plan.stages:
        seconds = _step(_model(depth, plan), stage, inputs, targets, plan.steps)
        parts = forward, backward, optimizer
        found.append(StepTime(stage, world, depth + 1, parameters, inputs.numel(), *parts, seconds))
        gc.collect()
    return found


def _model(depth: int, plan: MeasurePlan) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSize(plan.width, depth, heads=plan.width // 64 or 1, vocabulary=_VOCABULARY), plan.length)


def _passes(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> tuple[float, float]:
    """Seconds of the forward, and of the backward."""
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [loss_fn(model(inputs), targets)]

    def both() -> None:
        forward()
        losses[0].backward()
        for parameter in model.parameters():
            parameter.grad = None

    first = slowest(forward, steps)
    return first, max(slowest(both, steps) - first, 0.0)


def _update(elements: int, steps: int) -> float:
    one = nn.Parameter(torch.ones(max(elements, 1)))
    one.grad = torch.ones_like(one)
    return slowest(torch.optim.AdamW([one], fused=True).step, steps)


def _step(model: GPT, stage: int, inputs: Tensor, targets: Tensor, steps: int) -> float:
    with ZeroEngine(model, load_config(stage=stage, units={"classes": ["Block"]})) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        engine.attach(optimizer)

        def step() -> None:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

        return slowest(step, steps)
