"""A small training of which a process kills itself in a given phase of a given step, once.

    python -m zero_strategy.cli run --nproc-per-node 3 -m tests.survive.deaths FOLDER CONFIG STEPS DEATHS

DEATHS: JSON, a list of [step, phase, rank], or [step, phase, rank, signal].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.slots import digest_of
from zero_strategy.checkpoint.memory_writer import MemoryPieceWriter
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.survive import Run, formation, survive
from zero_strategy.survive import run as running
from zero_strategy.survive.copies import MemoryCopies

SLOTS = 12


class Net(nn.Module):
    """Three units with dropout, and a loss that is no function of the slots' number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def sample(step: int, slot: int) -> Tensor:
    """Rows of a slot."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 100 + slot))


class Deaths:
    """Deaths of this process that are still to come.

    Args:
        folder: Has a mark of each that has been.
        planned: See the module.
    """

    def __init__(self, folder: Path, planned: list[list[Any]]) -> None:
        self.folder, self._planned = folder, planned
        self.step, self.rank = 0, 0

    def at(self, phase: str, *_: object) -> None:
        """Die here, if that is planned."""
        for number, (step, planned, rank, *how) in enumerate(self._planned):
            if (step, planned, rank) == (self.step, phase, self.rank):
                try:
                    (self.folder / f"death{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), getattr(signal, how[0]) if how else signal.SIGKILL)
                time.sleep(60)  # a stopped process does not come back at once

    def forming(self) -> None:
        """Die while ranks form: at the start, where one comes to others who train, or where those are left anew."""
        trained = any(self.folder.glob("*.jsonl"))
        self.at("rebuild" if self.step else "rejoin" if trained else "form")

    def inside(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that dies on its way in."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(phase)
            return function(*args, **kwargs)

        return call


Training = Callable[[Run | None, dict[str, Any], int, Deaths, Callable[..., None]], str]
"""Trains with a config, so many steps, telling of each; the digest of weights and states."""


def train(run: Run | None, config: dict[str, Any], steps: int, deaths: Deaths, told: Callable[..., None]) -> str:
    """Train, and return the digest of weights and states."""
    torch.set_num_threads(1)
    if run is not None:
        deaths.rank = run.rank
        config = {**config, "survive": True}
    model = Net()
    deaths.at("begin")
    engine = ZeroEngine(model, {"reproducible": SLOTS, **config})
    install_diagnostics(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model.layers[1].register_forward_pre_hook(partial(deaths.at, "forward"))
    model.layers[1].register_full_backward_hook(partial(deaths.at, "backward"))
    optimizer.register_step_pre_hook(partial(deaths.at, "before the step"))
    optimizer.register_step_post_hook(partial(deaths.at, "after the step"))
    begin: dict[str, Any] = {"step": 0, "scheduler": scheduler.state_dict()}
    state = begin if run is None else run.restore(engine, begin)
    scheduler.load_state_dict(state["scheduler"])
    for step in range(state["step"], steps):
        deaths.step = step
        for _ in range(engine.slots.count):
            with engine.micro_batch() as slot:
                model(sample(step, slot)).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        deaths_told = engine.step_metrics().get("zero/deaths")
        if run is not None and step % 6 == 5:
            engine.save(deaths.folder / "saved", asynchronous=True)
            deaths.at("save")
        told(step=step, rank=0 if run is None else run.rank, lr=scheduler.get_last_lr()[0], deaths=deaths_told)
        if run is not None:
            run.commit(engine, {"step": step + 1, "scheduler": scheduler.state_dict()})
    return digest_of(engine, optimizer)


def main(train: Training, name: str, config: str, steps: str, planned: str) -> None:
    """One process of a training."""
    folder = Path(name)
    deaths = Deaths(folder, json.loads(planned))
    for owner, method, phase in (
        (MemoryPieceWriter, "write_all", "copy"), (MemoryPieceWriter, "commit", "commit"),
        (MemoryCopies, "restore", "restore"),
    ):  # fmt: skip
        setattr(owner, method, deaths.inside(phase, getattr(owner, method)))

    form = formation.form

    def forming(*args: Any, **keywords: Any) -> str:
        deaths.forming()
        return form(*args, **keywords)

    running.form = forming  # type: ignore[assignment, attr-defined, unused-ignore]

    def told(**what: Any) -> None:
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **what}) + "\n")

    digest = survive(lambda run: train(run, json.loads(config), int(steps), deaths, told))
    (folder / f"{os.getpid()}.digest").write_text(digest)


if __name__ == "__main__":
    main(train, *sys.argv[1:])
