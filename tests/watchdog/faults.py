"""Scripts in which rank 1 does something else than the others, and what becomes of every rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import Block, seeded
from tests.faulty import Faulty, Torn, no_number
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

QUICK = {"mode": "default", "wait_seconds": 0.2, "silence_seconds": 0.8}
"""Seconds; a rank that is merely slow is never given up, however short they are."""
PATIENCE = 15.0
"""Seconds within which every rank must know, on a machine that has others to serve."""


class Told(NamedTuple):
    """End of a rank: the exception's class, its text, the seconds until it came."""

    kind: str
    text: str
    seconds: float


class Model(nn.Module):
    """Units of different sizes; the one in the middle may have a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.middle = Faulty(Block())
        self.layers = nn.ModuleList([Block(), Block()])
        self.wide = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)])
        self.order: list[nn.Module] = [self.layers[0], self.middle, self.layers[1]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in self.order:
            x = part(x)
        for part in self.wide:
            x = part(x)
        return x


class Training:
    """A model under an engine, in a loop of one's own."""

    def __init__(self, stage: int, watchdog: dict[str, Any]) -> None:
        self.model = seeded(Model)
        units = {"min_numel": 0, "patterns": ["layers.[0-9]", "middle", "wide.*"]}
        self.engine = ZeroEngine(self.model, load_config(stage=stage, units=units, watchdog=watchdog))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.engine.attach(self.optimizer)
        self.rank = dist.get_rank()

    def backward(self) -> None:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(self.rank))
        self.model(x).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def linger(seconds: float = PATIENCE) -> None:
    """Be busy with something that is no collective, until the others have been told."""
    store: Any = dist.distributed_c10d._get_default_store()
    while store.add("told", 0) < store.add("to tell", 0) and seconds > 0:
        time.sleep(0.05)
        seconds -= 0.05


def play(
    fault: Callable[[Any], None],
    stage: int,
    watchdog: dict[str, Any] | None = None,
    make: Callable[..., Any] = Training,
) -> Told:
    """Two healthy steps of a training, then `fault` on rank 1, while the others train on."""
    training = make(stage, QUICK if watchdog is None else watchdog)
    store: Any = dist.distributed_c10d._get_default_store()
    training.step()
    training.step()
    if training.rank != 1:
        store.add("to tell", 1)
    dist.barrier()
    started = time.monotonic()
    told = Told("nothing", "", 0.0)
    try:
        if training.rank == 1:
            fault(training)
        for _ in range(3):
            training.step()
    except Exception as error:
        told = Told(type(error).__name__, str(error), time.monotonic() - started)
    if training.rank == 1:
        linger()
    else:
        store.add("told", 1)
    return told


def play_to_the_end(fault: Callable[[Training], None], stage: int) -> None:
    """The same where rank 1 does not come back: the others raise what they were told."""
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("pid", str(os.getpid()))
    told = play(fault, stage)
    if fault is stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(store.get("pid")), signal.SIGKILL)
    raise RuntimeError(f"{told.kind} after {told.seconds:.1f} s: {told.text}")


def play_all(
    faults: list[Callable[[Training], None]], stages: list[int], watchdog: dict[str, Any] | None = None
) -> dict[tuple[str, int], Told]:
    """Several, one after the other; the default process group is as before after each."""
    found = {}
    for fault in faults:
        for stage in stages:
            found[fault.__name__, stage] = play(fault, stage, watchdog)
            dist.barrier()
    return found


def raise_in_forward(training: Training) -> None:
    training.model.middle.fault = no_number
    training.step()


def raise_in_backward(training: Training) -> None:
    training.model.middle.fault = Torn.apply
    training.step()


class _Unreadable:
    """A learning rate that cannot be had, so that the step ends half-way."""

    def __float__(self) -> float:
        raise OSError("no disk today")


def raise_in_step(training: Training) -> None:
    training.backward()  # ranks compare their rates at its end
    training.optimizer.param_groups[0]["lr"] = _Unreadable()
    training.optimizer.step()


def state_dict_alone(training: Training) -> None:
    training.model.state_dict()


def skip_a_unit(training: Training) -> None:
    training.model.order.pop()


def other_branch(training: Training) -> None:
    first, middle, last = training.model.order
    training.model.order = [last, last, middle, first]


def come_late(training: Training) -> None:
    time.sleep(1.6)


def stop(training: Training) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end_script(training: Training) -> None:
    """Exit of the interpreter after an exception that nobody caught."""
    try:
        raise LookupError("no such sample")
    except LookupError as error:
        sys.last_value = error
        atexit._run_exitfuncs()
        os._exit(1)


def barrier(training: Training) -> None:
    dist.barrier()


def recover(training: Training) -> None:
    """Catch the exception and go on with the same batch, after a while."""
    try:
        raise_in_forward(training)
    except FloatingPointError:
        time.sleep(0.5)
        training.engine.reset()
        training.model.middle.fault = None
