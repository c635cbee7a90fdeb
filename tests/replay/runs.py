"""Small recorded runs in slots, whole or with a planted fault, on the ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.reproducible.training import build, tokens_of
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine

STEPS, SLOTS, CLIP = 3, 4, 0.5
UNITS = ("blocks.0", "blocks.1", "blocks.2")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once.

    Attributes:
        kind: As of a `Difference`; "" is no fault.
        step: In which.
        slot: Of data, seed and kernel.
        unit: Of kernel and race.
        rank: Of race.
        key: Of config: "lr", "weight_decay" or "clip".
    """

    kind: str = ""
    step: int = 0
    slot: int = 0
    unit: str = ""
    rank: int = 0
    key: str = ""


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        directory: Where it is recorded.
        fault: What is planted.
        config: Of the engine.
        slots: Of a step.
        steps: Its last step is before this.
        save: A checkpoint is written after so many steps, in "after-N" of the directory; 0: none is.
        resume: Begin with that checkpoint.
        settings: Further ones of diagnostics.
        scheduled: The learning rate falls from step to step.
    """

    directory: Path
    fault: Fault = Fault()
    config: dict[str, Any] = field(default_factory=lambda: {"stage": 3})
    slots: int = SLOTS
    steps: int = STEPS
    save: int = 0
    resume: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    scheduled: bool = False


def train_all(runs: list[Run]) -> None:
    """Train them one after the other; the ranks of a pool call it."""
    torch.set_num_threads(1)
    for run in runs:
        train(run)


def optimizer_for(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def factory() -> Any:
    """The training of all runs here."""
    return build(), optimizer_for, tokens_of, lambda model, tokens: model(tokens)


def train(run: Run) -> None:
    model = build()
    diagnostics = {"run_dir": str(run.directory), "trace_steps": 0, "flops": False, **run.settings}
    config = {**run.config, "reproducible": {"slots": run.slots, "seed": 11}, "diagnostics": diagnostics}
    with ZeroEngine(model, config) as engine:
        plant = Planted(engine, run.fault)  # first: what it does in an event comes before the journal's look
        install_diagnostics(engine)
        optimizer = optimizer_for(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)) if run.scheduled else None
        engine.attach(optimizer)
        if run.resume is not None:
            engine.load(run.resume)
        while (step := engine.steps.taken) < run.steps:
            for _ in range(engine.slots.count):
                with engine.micro_batch() as slot, plant.in_slot(step, slot) as tokens:
                    model(tokens).backward()
            engine.clip_grad_norm_(plant.before_step(step, optimizer))
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            if run.save == step + 1:
                engine.save(run.directory / f"after-{run.save}")


class Planted:
    """A fault, where and when it belongs.

    Args:
        engine: Its training.
        fault: What it is.
    """

    def __init__(self, engine: ZeroEngine, fault: Fault) -> None:
        self._engine, self._fault = engine, fault
        self._rank = engine.mesh.rank
        if fault.kind == "race":
            engine.slots.listeners.append(self._slot_event)

    @contextmanager
    def in_slot(self, step: int, slot: int) -> Iterator[Tensor]:
        """Around a micro-batch; gives its tokens."""
        fault, tokens = self._fault, tokens_of(step, slot)
        here = (step, slot) == (fault.step, fault.slot)
        if here and fault.kind == "seed":
            torch.rand(1)
        if here and fault.kind == "data":
            tokens = tokens.clone()
            tokens[0, 0] = (tokens[0, 0] + 1) % 40
        with self._wrong_output() if here and fault.kind == "kernel" else nullcontext():
            yield tokens

    @contextmanager
    def _wrong_output(self) -> Iterator[None]:
        module = self._engine.module.get_submodule(self._fault.unit)
        hook = module.register_forward_hook(lambda *given: given[2] * (1 + 2**-12), prepend=True)
        try:
            yield
        finally:
            hook.remove()

    def _slot_event(self, event: str, value: Any) -> None:
        """One element of this rank's part of a reduced gradient is off by a bit."""
        engine, fault = self._engine, self._fault
        step = engine.steps.taken
        if event != "slot over" or not engine.slots.complete or (step, self._rank) != (fault.step, fault.rank):
            return
        unit = next(unit for unit in engine.model.units if unit.name == fault.unit)
        for bucket in unit.buckets:
            piece = max(bucket.pieces, key=lambda piece: piece.numel)
            engine.model.gradient_of(bucket).change(piece.index, _flip)

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> float:
        """The bound of the clip."""
        fault = self._fault
        if fault.kind == "config" and step == fault.step:
            if fault.key == "clip":
                return CLIP * 1.5
            optimizer.param_groups[0][fault.key] *= 1.25
        return CLIP


def _flip(values: Tensor) -> None:
    values.view(torch.int32)[values.numel() // 3] ^= 1
