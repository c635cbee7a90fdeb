"""A small model as layers with dropout, trained in slots by pipelines, or by one plain engine that runs all layers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.reproducible.training import SEED, VOCABULARY, WIDTH, Block, tokens_of
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.muon import MatrixSplit, MuonAdamW
from zero_strategy.pipeline.building import LayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule


class Sometimes(nn.Module):
    """A layer that some micro-batches leave out, with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1.0 + 0.1 * torch.rand(()))
        return x + self.linear(x) if float(x.detach()[0, 0, 0]) > 0 else x


def layers(blocks: int = 5) -> list[Any]:
    middle = [LayerSpec(Block) for _ in range(blocks)]
    middle.insert(2, LayerSpec(Sometimes))
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def noisy_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Draws random numbers, too, torch's and Python's."""
    noisy = F.dropout(outputs, 0.1) * (1.0 + 0.1 * random.random())
    return F.cross_entropy(noisy.flatten(0, 1), labels.flatten())


def pair_of(step: int, slot: int) -> tuple[Tensor, Tensor]:
    tokens = tokens_of(step, slot)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Run:
    """One training, on all ranks there are.

    Attributes:
        stages: Ranks of a pipeline; 0: a plain engine.
        schedule: Of the pipeline.
        config: Beside what follows from the others.
        interval: Layers that are computed again together.
        slots: Of a step.
        steps: Optimizer steps.
        optimizer: "AdamW" or "MuonAdamW".
        dtype: Of the computation.
    """

    stages: int
    schedule: str = "1f1b"
    config: dict[str, Any] = field(default_factory=dict)
    interval: int = 0
    slots: int = 12
    steps: int = 3
    optimizer: str = "AdamW"
    dtype: torch.dtype | None = None

    def module(self) -> PipelineModule:
        """Has the same first weights for all runs."""
        torch.manual_seed(5)
        return PipelineModule(
            layers(),
            max(self.stages, 1),
            loss_fn=noisy_loss,
            schedule=self.schedule if self.stages else None,
            activation_checkpoint_interval=self.interval,
        )

    def engine(self, module: PipelineModule) -> ZeroEngine:
        config = {**self.config, "reproducible": {"slots": self.slots, "seed": SEED}}
        if not self.stages:
            return ZeroEngine(module, config, compute_dtype=self.dtype)
        config["pipeline"] = {"schedule": self.schedule, **self.config.get("pipeline", {})}
        return PipelineEngine(module, config, compute_dtype=self.dtype)


def optimizer_of(run: Run, module: PipelineModule) -> torch.optim.Optimizer:
    if run.optimizer == "AdamW":
        return torch.optim.AdamW(module.parameters(), lr=1e-2)
    named = dict(module.named_parameters())
    blocks = {name for name, child in module.named_children() if isinstance(child, Block)}
    matrices = {name: p for name, p in named.items() if p.dim() == 2 and name.split(".")[0] in blocks}
    others = {name: p for name, p in named.items() if name not in matrices}
    return MuonAdamW(MatrixSplit(matrices, others), muon={"lr": 0.02}, adamw={"lr": 0.01})


def step_of(engine: ZeroEngine, module: PipelineModule, step: int) -> float:
    """All slots of a step, forward and backward; their mean loss."""
    if isinstance(engine, PipelineEngine):
        return float(engine.forward_backward(pair_of(step, slot) for slot in engine.slots.own))
    losses = []
    for _ in range(engine.slots.count):
        with engine.micro_batch() as slot:
            inputs, labels = pair_of(step, slot)
            loss = noisy_loss(module(inputs), labels)
            loss.backward()
            losses.append(float(loss.detach()))
    return float(engine.slots.mean(losses).float())


Found = tuple[str, list[float], list[float]]
"""Digest of weights and states; mean losses and norms by step."""
Between = Callable[[ZeroEngine], object]


def train(run: Run, *, begin: Between | None = None, end: Between | None = None, first: int = 0) -> Found:
    """Train; `begin` and `end` are called with the engine before the first and after the last step."""
    module = run.module()
    optimizer = optimizer_of(run, module)
    with run.engine(module) as engine:
        engine.attach(optimizer)
        if begin is not None:
            begin(engine)
        losses, norms = [], []
        for step in range(first, first + run.steps):
            torch.rand(1 + engine.mesh.rank)  # what is drawn in between is of no effect
            losses.append(step_of(engine, module, step))
            norms.append(float(engine.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if end is not None:
            end(engine)
        return digest_of(engine, optimizer), losses, norms


def digest_of(engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of the weights and all states, by name."""
    found = hashlib.sha256()
    for name, value in sorted(engine.full_state_dict().items()):
        found.update(name.encode() + _bytes(value))
    states = engine.full_optimizer_state(optimizer)
    for name in sorted(states):
        for key in sorted(states[name]):
            found.update(f"{name} {key}".encode() + _bytes(torch.as_tensor(states[name][key])))
    return found.hexdigest()


def _bytes(value: Tensor) -> bytes:
    return bytes(value.reshape(-1).contiguous().view(torch.uint8).numpy())
