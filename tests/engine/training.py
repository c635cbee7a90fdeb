"""The engine trains the oracles' models on the oracles' data, with the training code a user would write."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tests.models import Kind, build, loss_fn, param_groups
from tests.reference import (
    MODEL_SEED,
    OptimizerFactory,
    Order,
    Trained,
    adamw,
    global_batch,
    micro_batch,
    train_ddp,
)
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

DEFAULT_ORDER: dict[int, Order] = {0: "per_step", 1: "per_step", 2: "per_micro_batch", 3: "per_micro_batch"}
"""When gradients are reduced if the config does not say."""


@dataclass(frozen=True)
class Case:
    """One training run; also the key of its oracle."""

    kind: Kind
    accumulation: int
    clip_norm: float | None
    stage: int | None = None
    """None: DistributedDataParallel."""
    reduction: Order | None = None
    """None: the stage's default."""
    optimizer: OptimizerFactory = adamw

    @property
    def order(self) -> Order:
        return self.reduction or DEFAULT_ORDER[self.stage or 0]


def train_cases(cases: Sequence[Case], steps: int) -> list[Trained]:
    """Trains the cases one after the other; to be called on every rank of a run."""
    return [train_case(case, steps) for case in cases]


def train_case(case: Case, steps: int) -> Trained:
    if case.stage is None:
        return train_ddp(case.kind, case.accumulation, steps, case.clip_norm, case.optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(case.kind, MODEL_SEED)
    # These models are so small that their blocks would not become units of their own.
    config = load_config(stage=case.stage, gradient_reduction=case.reduction, units={"min_numel": 0})
    engine = ZeroEngine(model, config)
    optimizer = case.optimizer(param_groups(model))
    engine.attach(optimizer)
    losses: list[list[list[float]]] = []
    norms: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = global_batch(case.kind, step, world, case.accumulation)
        step_losses: list[float] = []
        for index in range(case.accumulation):
            last = index == case.accumulation - 1
            with contextlib.nullcontext() if last else engine.no_sync():
                loss = loss_fn(model, micro_batch(batch, rank, world, index))
                (loss / case.accumulation).backward()
            step_losses.append(loss.item())
        if case.clip_norm is not None:
            norms.append(float(engine.clip_grad_norm_(case.clip_norm)))
        optimizer.step()
        losses.append([step_losses])
    names = [name for name, _ in model.named_parameters()]
    weights = engine.full_state_dict()
    state = engine.full_optimizer_state(optimizer)
    return Trained(
        losses,
        {name: weights[name] for name in names},
        {name: dict(entry) for name, entry in state.items() if entry},
        norms,
    )
