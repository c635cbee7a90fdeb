"""Pipelines of one, two and four ranks against one process: losses, every gradient's bits, outputs, messages, times."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.pipelines import (
    Case,
    build_layers,
    build_stages,
    data_of,
    expected,
    gradients_of,
    loss_fn,
    micro_batches,
)
from zero_strategy.pipeline import DataParallelSchedule, InferenceSchedule, Placement, build_table, lower
from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.executor import Executor
from zero_strategy.pipeline.hooks import Computation, ExecutorHooks

_SCHEDULES = [
    ("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("interleaved_zb", 2), ("zbv", 2),
    ("TrainSchedule", 1),
]  # fmt: skip


def _cases(ranks: int) -> list[Case]:
    return [
        Case(name, ranks, chunks, count, uneven)
        for name, chunks in _SCHEDULES
        for count in range(1, 9)
        for uneven in (False, True)
        if not uneven or count in (2, 3, 8)
    ]


def _train(cases: list[Case]) -> list[tuple[Tensor | None, dict[str, Tensor]]]:
    """All cases, one after the other; pipelines of one placement are used again for all numbers of micro-batches."""
    rank, found = dist.get_rank(), []
    executors: dict[Placement, tuple[Executor, list[nn.Module]]] = {}
    for case in cases:
        placement = case.placement()
        if placement not in executors:
            stages = build_stages(case, rank)
            executors[placement] = Executor(stages, placement, loss_fn=loss_fn, name=str(placement)), stages
        executor, stages = executors[placement]
        for stage in stages:
            stage.zero_grad()
        run = executor.run(case.schedules()[rank], data_of(case, rank))
        found.append((run.loss, gradients_of(case, rank, stages)))
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_have_the_bits_of_one_process(ranks: Launcher, count: int) -> None:
    cases = _cases(count)
    results = ranks(count)(_train, cases)
    for i, case in enumerate(cases):
        loss, gradients = expected(case)
        found: dict[str, Tensor] = {}
        for result in results:
            found |= result[i][1]
            assert result[i][0] is not None and float(result[i][0]) == pytest.approx(loss, abs=1e-6), case
        assert found.keys() == gradients.keys(), case
        for name, gradient in gradients.items():
            assert torch.equal(found[name], gradient), (case, name)
