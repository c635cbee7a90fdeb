"""A script's training loop, under Accelerate's class and under ours, on the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_strategy.integrations.accelerate import ZeroAccelerator


def as_launched() -> None:
    """Make Accelerate see the ranks of a pool, in a state as a launcher sets it up."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # looked at, unused
    _reset()


@contextmanager
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process; a run of ranks gets its own."""
    as_launched()
    try:
        yield
    finally:
        _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make(stage: int | None, zero: dict[str, Any] | None = None, **keywords: Any) -> Accelerator:
    """Ours at a stage, or Accelerate's own if None."""
    if stage is None:
        return Accelerator(cpu=True, **keywords)
    return ZeroAccelerator(zero_config={"stage": stage, "units": {"min_numel": 0}, **(zero or {})}, **keywords)


class Net(nn.Module):
    """A tie, a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        self.last = nn.Linear(12, 6, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(x) * self.scale
        return result


def loader(rows: int = 44, batch: int = 4, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator)
    order = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(x, x.cos()), batch_size=batch, shuffle=shuffle, generator=order)


@dataclass
class Run:
    """Results of a training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Job:
    """Objects that a script prepares."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    @classmethod
    def of(cls, accelerator: Any, order: str = "model first") -> Job:
        model, data = Net(), loader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        if order == "model first":
            model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        elif order == "optimizer first":
            scheduler, data, optimizer, model = accelerator.prepare(scheduler, data, optimizer, model)
        else:  # each in a call of its own, the optimizer before its model
            optimizer = accelerator.prepare(optimizer)
            data = accelerator.prepare(data)
            model = accelerator.prepare(model)
            scheduler = accelerator.prepare(scheduler)
        return cls(accelerator, model, optimizer, data, scheduler)

    def epoch(self, run: Run, clip: float | None = 0.3) -> None:
        for x, y in self.loader:
            self.batch(run, x, y, clip)

    def batch(self, run: Run, x: Tensor, y: Tensor, clip: float | None = 0.3) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                run.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), clip)))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        run.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        run.rates.append(float(self.scheduler.get_last_lr()[0]))

    def finish(self, run: Run) -> Run:
        state = self.accelerator.get_state_dict(self.model)
        run.state = {name: value.clone() for name, value in state.items()}
        return run


def train(stage: int | None, order: str = "model first", steps: int = 1, **keywords: Any) -> Run:
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        job, run = Job.of(make(stage, gradient_accumulation_steps=steps, **keywords), order), Run()
        for _ in range(2):
            job.epoch(run)
        return job.finish(run)


def difference(a: Run, b: Run) -> float:
    """The largest in losses, norms, learning rates and weights."""
    assert len(a.losses) == len(b.losses) and len(a.norms) == len(b.norms) and a.state.keys() == b.state.keys()
    numbers = zip([*a.losses, *a.norms, *a.rates], [*b.losses, *b.norms, *b.rates], strict=True)
    weights = [float((a.state[name] - b.state[name]).abs().max()) for name in a.state]
    return max(*(abs(x - y) for x, y in numbers), *weights)
