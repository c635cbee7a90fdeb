"""Oracles: the training that the engine must reproduce, in plain torch.

All of them train on the same global batches. The global batch of a step has ``accumulation * world * ROWS``
rows; micro-batch a of rank r is the ``ROWS`` rows of it from ``ROWS * (a * world + r)`` on. The loss of a
micro-batch is divided by the number of accumulated micro-batches before backward, and the gradients are
averaged over the ranks, so that every oracle descends on the mean over the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import Batch, Kind, build, loss_fn, make_batch, param_groups

Order = Literal["per_step", "per_micro_batch"]
ORDERS: tuple[Order, ...] = ("per_step", "per_micro_batch")
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OptimizerState = dict[str, dict[str, Any]]
ROWS = 2
MODEL_SEED = 3


@dataclass(frozen=True)
class Trained:
    """Files that a training run leaves behind."""

    losses: list[list[list[float]]]
    """By step, rank and micro-batch. The plain oracle has one rank and micro-batch, DDP only its own rank."""
    weights: dict[str, Tensor]
    """By parameter name, ties once under their first name."""
    optimizer: OptimizerState
    """By parameter name; parameters without state are left out."""
    norms: list[float] = field(default_factory=list)
    """The global gradient norm of each step before clipping; empty without clipping."""

    def mean_losses(self) -> list[float]:
        """The loss of the global batch, step by step."""
        return [torch.tensor(step, dtype=torch.float64).mean().item() for step in self.losses]


# ----------------------------------------------------------------------------------------------- optimizers


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, foreach=False)


def adamw_foreach(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, foreach=True)


def sgd_momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True, foreach=False)


# ----------------------------------------------------------------------------------------------------- data


def global_batch(kind: Kind, step: int, world: int, accumulation: int, dtype: torch.dtype = torch.float32) -> Batch:
    return make_batch(kind, seed=1000 + step, size=accumulation * world * ROWS, dtype=dtype)


def micro_batch(batch: Batch, rank: int, world: int, index: int) -> Batch:
    start = ROWS * (index * world + rank)
    return batch[start : start + ROWS]


# ----------------------------------------------------------------------------- gradients, norm and clipping


def add_gradients(terms: Iterable[Tensor | None]) -> Tensor | None:
    """Sum from left to right; None stands for a zero, and a sum of nothing else stays None."""
    total: Tensor | None = None
    for term in terms:
        if term is not None:
            total = term.clone() if total is None else total.add_(term)
    return total


def global_norm(gradients: Iterable[Tensor | None]) -> float:
    squares = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    return float(torch.tensor(squares, dtype=torch.float64).sqrt())


def clip(gradients: list[Tensor], max_norm: float) -> float:
    """Scales in place, returns the norm before. The coefficient is float64 until it is applied as float32."""
    norm = global_norm(gradients)
    coefficient = torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float64).to(torch.float32)
    for gradient in gradients:
        gradient.mul_(coefficient)
    return norm


def _micro_gradients(model: nn.Module, batch: Batch, accumulation: int) -> tuple[float, list[Tensor | None]]:
    """Loss and gradients of one micro-batch on its own, in the order of ``model.parameters()``."""
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, batch)
    (loss / accumulation).backward()
    return loss.item(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _reduce(per_rank: list[list[list[Tensor | None]]], order: Order) -> list[Tensor | None]:
    """From ``per_rank[rank][micro_batch][parameter]`` to the averaged gradient of each parameter."""
    world, accumulation, count = len(per_rank), len(per_rank[0]), len(per_rank[0][0])

    def average(terms: Iterable[Tensor | None]) -> Tensor | None:
        total = add_gradients(terms)
        return None if total is None else total.mul_(1 / world)

    if order == "per_step":
        return [average([add_gradients(micro[i] for micro in rank) for rank in per_rank]) for i in range(count)]
    return [
        add_gradients([average([rank[a][i] for rank in per_rank]) for a in range(accumulation)]) for i in range(count)
    ]


# -------------------------------------------------------------------------------------------------- oracles


def train_rank_separated(
    kind: Kind,
    world: int,
    accumulation: int,
    steps: int,
    clip_norm: float | None,
    order: Order,
    optimizer_factory: OptimizerFactory = adamw,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Each rank's micro-batches by themselves in one process, summed in the engine's documented order.

    ``per_step``: each rank adds up its micro-batches; these sums are added in rank order, times 1/world.
    ``per_micro_batch``: after every micro-batch the ranks' gradients are added in rank order, times 1/world;
    these averages are added up.
    """
    model = build(kind, MODEL_SEED, dtype)
    optimizer = optimizer_factory(param_groups(model))
    losses: list[list[list[float]]] = []
    norms: list[float] = []
    for step in range(steps):
        batch = global_batch(kind, step, world, accumulation, dtype)
        step_losses: list[list[float]] = []
        per_rank: list[list[list[Tensor | None]]] = []
        for rank in range(world):
            parts = [micro_batch(batch, rank, world, a) for a in range(accumulation)]
            pairs = [_micro_gradients(model, part, accumulation) for part in parts]
            step_losses.append([loss for loss, _ in pairs])
            per_rank.append([gradients for _, gradients in pairs])
        losses.append(step_losses)
        for parameter, gradient in zip(model.parameters(), _reduce(per_rank, order), strict=True):
            parameter.grad = gradient
        if clip_norm is not None:
            norms.append(clip([p.grad for p in model.parameters() if p.grad is not None], clip_norm))
        optimizer.step()
    return Trained(losses, weights_of(model), optimizer_state_of(model, optimizer), norms)


def train_plain(
    kind: Kind,
    world: int,
    accumulation: int,
    steps: int,
    clip_norm: float | None,
    optimizer_factory: OptimizerFactory = adamw,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Ordinary training on the whole global batch at once."""
    model = build(kind, MODEL_SEED, dtype)
    optimizer = optimizer_factory(param_groups(model))
    losses: list[list[list[float]]] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, global_batch(kind, step, world, accumulation, dtype))
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append([[loss.item()]])
    return Trained(losses, weights_of(model), optimizer_state_of(model, optimizer))


def train_ddp(
    kind: Kind,
    accumulation: int,
    steps: int,
    clip_norm: float | None,
    optimizer_factory: OptimizerFactory = adamw,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """DistributedDataParallel; to be called on every rank of a run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(kind, MODEL_SEED, dtype)
    optimizer = optimizer_factory(param_groups(model))
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    losses: list[list[list[float]]] = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = global_batch(kind, step, world, accumulation, dtype)
        step_losses: list[float] = []
        for index in range(accumulation):
            last = index == accumulation - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = loss_fn(parallel, micro_batch(batch, rank, world, index))
                (loss / accumulation).backward()
            step_losses.append(loss.item())
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append([step_losses])
    return Trained(losses, weights_of(model), optimizer_state_of(model, optimizer))


def merge_ranks(results: list[Trained]) -> Trained:
    """The ranks' own losses side by side; weights and optimizer state of rank 0."""
    steps = range(len(results[0].losses))
    losses = [[rank_losses for result in results for rank_losses in result.losses[step]] for step in steps]
    return Trained(losses, results[0].weights, results[0].optimizer, results[0].norms)


# ----------------------------------------------------------------------------------------------- comparison


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    return {
        name: {key: copied(value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if optimizer.state.get(p)
    }


def unequal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, str]:
    """By name, in what way two sets of tensors are not exactly equal; empty where they are."""
    found = {name: "missing" for name in expected.keys() - actual.keys()}
    found |= {name: "not expected" for name in actual.keys() - expected.keys()}
    for name in sorted(expected.keys() & actual.keys()):
        a, e = actual[name], expected[name]
        if a.shape != e.shape or a.dtype != e.dtype:
            found[name] = f"{tuple(a.shape)} {a.dtype}, expected {tuple(e.shape)} {e.dtype}"
        elif not torch.equal(a, e):
            off = (a != e).sum().item()
            found[name] = f"{off} of {e.numel()} elements differ, by up to {(a - e).abs().max().item():.3g}"
    return found


def flat_state(state: OptimizerState) -> dict[str, Tensor]:
    """``{"name/key": value}``, numbers as tensors, so that optimizer states compare like weights."""
    return {
        f"{name}/{key}": torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float32)
        for name, entry in state.items()
        for key, value in entry.items()
        if value is not None
    }


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Euclidean distance of each tensor, relative to the expected one's length."""
    return {
        name: float((actual[name].double() - e.double()).norm() / e.double().norm().clamp_min(1e-12))
        for name, e in expected.items()
        if e.numel()
    }
