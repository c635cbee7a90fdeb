"""Healthy ranks that are slow, or leave early, are left in peace."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.launcher import Launcher
from tests.watchdog.faults import Training

PATIENT = {"mode": "default", "wait_seconds": 0.15, "silence_seconds": 0.3}
LATE = 1.0
"""Seconds: several times those after which a rank that has failed is given up."""


def use_collectives_of_their_own() -> int:
    """Rank 2 is late for each; ranks that have done their part go on to a step, where they wait for all."""
    training = Training(0, PATIENT)
    rank, value = training.rank, torch.ones(1)
    for collective in range(4):
        if rank == 2:
            time.sleep(LATE)
        if collective == 0:
            dist.gather_object(rank, [None] * 3 if rank == 0 else None, dst=0)
        elif collective == 1:
            dist.reduce(value, 0)
        elif collective == 2:
            parts: list[Any] = [None]
            dist.scatter_object_list(parts, [1, 2, 3] if rank == 0 else None, src=0)
        elif rank == 0:
            for other in (1, 2):
                dist.recv(value, other)
        else:
            dist.send(value, 0)
        training.step()
    return training.engine.steps.taken


def test_ranks_that_have_done_their_part_in_a_collective_of_somebody_else(ranks: Launcher) -> None:
    assert ranks(3)(use_collectives_of_their_own) == [4, 4, 4]


def train_in_a_thread() -> list[str]:
    """As Ray's workers do. Rank 1's backward takes long, while the other one waits for it."""
    training, told = Training(1, PATIENT), list[str]()
    if training.rank == 1:
        training.model.middle.fault = _Slow.apply

    def train() -> None:
        try:
            training.step()
        except Exception as error:
            told.append(repr(error))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return told


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE)
        return gradient


def test_training_in_another_thread(ranks: Launcher) -> None:
    assert ranks(2)(train_in_a_thread) == [[], []]


def leave_a_block() -> str:
    training = Training(1, PATIENT)
    try:
        with training.engine:
            training.step()
            if training.rank == 1:
                raise LookupError("no such sample")
            training.step()
    except Exception as error:
        return str(error)
    return ""


def test_an_exception_that_leaves_the_block_of_an_engine_is_told(ranks: Launcher) -> None:
    told, own = ranks(2)(leave_a_block)
    assert own == "no such sample"
    assert told.startswith("rank 1 raised LookupError: no such sample (test_healthy.py:"), told
