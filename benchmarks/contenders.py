"""What the step benchmark compares: our engine at each stage, and PyTorch's own DDP and FSDP2.

Each is set up as its own documentation recommends, with the same model, optimizer, data and clipping:

- ``ddp``: DistributedDataParallel with ``gradient_as_bucket_view=True`` and ``no_sync`` while accumulating.
- ``fsdp2``: ``fully_shard`` on every block and on the root, parameters released after forward, and gradients
  reduced after every micro-batch, so that no rank holds more than its slice of them.
- ``zero0`` ... ``zero3``: ZeroEngine with the defaults of its config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpt import GPT, SIZES, build, loss_fn

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": False},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
}
PEERS = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Workload:
    """What every contender trains on."""

    model: str = "transformer-small"
    batch: int = 4
    """Rows per rank and micro-batch."""
    length: int = 128
    accumulation: int = 1
    clip_norm: float | None = 1.0
    optimizer: str = "adamw"

    def data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step, the same for all contenders."""
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        shape = (self.accumulation, self.batch, self.length + 1)
        rows = torch.randint(SIZES[self.model].vocabulary, shape, generator=generator)
        return [(micro[:, :-1], micro[:, 1:]) for micro in rows]


@dataclass
class Contender:
    """A model ready to train: the parts of a step that differ between contenders."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Any]
    no_sync: Callable[[], AbstractContextManager[Any]]
    steps: int = 0

    def step(self, workload: Workload) -> float:
        """One optimizer step on the contender's next data; returns the mean loss of this rank."""
        total = 0.0
        batches = workload.data(self.steps)
        for index, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else self.no_sync():
                loss = loss_fn(self.forward(inputs), targets) / len(batches)
                loss.backward()
            total += loss.item()
        if workload.clip_norm is not None:
            self.clip(workload.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return total


def make(name: str, workload: Workload) -> Contender:
    """Builds a contender; on every rank. All start from the same weights."""
    model = build(workload.model, workload.length)
    if name == "ddp":
        return _ddp(model, workload)
    if name == "fsdp2":
        return _fsdp2(model, workload)
    if name in {"zero0", "zero1", "zero2", "zero3"}:
        return _zero(model, workload, int(name[-1]))
    raise ValueError(f"{name!r} is no contender; there are {', '.join(PEERS)} and zero0 to zero3")


def _optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **OPTIMIZERS[workload.optimizer])


def _ddp(model: GPT, workload: Workload) -> Contender:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contender(
        parallel,
        _optimizer(model, workload),
        lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        parallel.no_sync,
    )


def _fsdp2(model: GPT, workload: Workload) -> Contender:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(
        model,
        _optimizer(model, workload),
        lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        contextlib.nullcontext,
    )


def _zero(model: GPT, workload: Workload, stage: int) -> Contender:
    # Imported late: DDP and FSDP2 can be compared with each other without it.
    from zero_strategy.config import load_config
    from zero_strategy.engine import ZeroEngine

    engine = ZeroEngine(model, load_config(stage=stage))
    optimizer = _optimizer(model, workload)
    engine.attach(optimizer)
    return Contender(model, optimizer, engine.clip_grad_norm_, engine.no_sync)
