"""Pipelines of one, two and four ranks against one process: losses, every gradient's bits, outputs, messages, times."""

from __future__ import annotations

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
from zero_strategy.pipeline import DataParallelSchedule, InferenceSchedule, Placement, build_table
from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.executor import Executor
from zero_strategy.pipeline.hooks import Computation, ExecutorHooks
from zero_strategy.pipeline.timeline import Event

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
        if not uneven or count in (3, 8)
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


def _evaluate(cases: list[Case]) -> list[tuple[Tensor | None, list[Tensor], Tensor | None, list[Tensor]]]:
    """Each case forwards only, by a table or InferenceSchedule; with labels and without."""
    rank, found = dist.get_rank(), []
    executors = {}
    for case in cases:
        place = case.placement()
        if place not in executors:
            executors[place] = Executor(build_stages(case, rank), place, loss_fn=loss_fn, name=str(place))
        executor = executors[place]
        schedule = (
            InferenceSchedule(case.micro_batches, case.ranks, rank)
            if case.schedule == "TrainSchedule"
            else case.inference()[rank]
        )
        run = executor.run(schedule, data_of(case, rank))
        data = data_of(case, rank)
        bare = executor.run(schedule, None if data is None else ((tokens,) for tokens, _ in data))
        found.append((run.loss, run.outputs, bare.loss, bare.outputs))
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_evaluation_gives_outputs_and_loss(ranks: Launcher, count: int) -> None:
    """With one executor for all numbers of micro-batches."""
    names = [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("TrainSchedule", 1)]
    cases = [Case(name, count, chunks, m, m % 2 == 0) for name, chunks in names for m in (1, 5, 2, 8)]
    results = ranks(count)(_evaluate, cases)
    model = nn.Sequential(*build_layers())
    for i, case in enumerate(cases):
        loss, _ = expected(case)
        last = case.placement().rank_of(case.placement().stages - 1)
        wanted = [model(tokens) for tokens, _ in micro_batches(case.micro_batches, case.uneven)]
        for rank, result in enumerate(results):
            found, outputs, bare_loss, bare_outputs = result[i]
            assert bare_loss is None and float(found) == pytest.approx(loss, abs=1e-6)
            assert (len(outputs), len(bare_outputs)) == ((len(wanted),) * 2 if rank == last else (0, 0))
            for one, other, want in zip(outputs, bare_outputs, wanted):
                assert torch.equal(one, want) and torch.equal(other, want) and not one.requires_grad


class _Notes(ExecutorHooks):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def before(self, computation: Computation) -> None:
        self.said.append(computation)

    def after(self, computation: Computation) -> None:
        assert computation in self.said[-2:]

    def forwarded(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        assert loss is not None and not loss.requires_grad
        self.said.append(("forwarded", micro_batch))

    def reduce_tied_grads(self) -> None:
        self.said.append("tied")

    def reduce_grads(self) -> None:
        self.said.append("reduce")

    def optimizer_step(self) -> None:
        self.said.append("step")


def test_hooks_are_called_and_told_the_last_backward() -> None:
    case, notes = Case("zb_h1", 1, 1, 3, False), _Notes()
    executor = Executor(build_stages(case, 0), case.placement(), loss_fn=loss_fn, hooks=notes)
    executor.run(case.schedules()[0], data_of(case, 0))
    assert notes.said[-3:] == ["tied", "reduce", "step"]
    told = [one for one in notes.said if isinstance(one, Computation)]
    assert [one.micro_batch for one in told if one.kind is Kind.FORWARD] == [0, 1, 2]
    assert [one for one in notes.said if one[0] == "forwarded"] == [("forwarded", i) for i in range(3)]
    assert [(one.kind, one.micro_batch) for one in told if one.last] == [(Kind.BACKWARD_WEIGHT, 2)]
    notes.said.clear()
    executor.run(DataParallelSchedule(2, 1, 0), data_of(case, 0))
    assert notes.said[-2:] == ["reduce", "step"]


def _record(case: Case) -> tuple[list[Event], dict[str, int]]:
    rank = dist.get_rank()
    executor = Executor(build_stages(case, rank), case.placement(), loss_fn=loss_fn, record=True)
    schedule = case.schedules()[rank]
    executor.run(schedule, data_of(case, rank))
    counters = executor.counters
    assert counters is not None
    first = dict(counters.calls)
    counters.reset()
    run = executor.run(schedule, data_of(case, rank))
    return run.events, {"first": first.get("control", 0), **counters.calls}


def test_a_steady_run_sends_one_message_per_activation_and_is_recorded(ranks: Launcher) -> None:
    case = Case("1f1b", 2, 1, 4, False)
    (first, sent), (second, back) = ranks(2)(_record, case)
    assert sent == {"first": 1, "activation": 4}
    assert back == {"first": 0, "gradient": 4, "loss": 1}
    rows = build_table("1f1b", 2, 4, 1).rows
    for rank, events in enumerate((first, second)):
        computed = [(event.kind, event.micro_batch) for event in events if event.computes]
        assert computed == [(action.kind.value, action.micro_batch) for action in rows[rank]]
        assert all(event.start <= event.end and event.rank == rank for event in events)
    starts = {(event.rank, event.kind, event.micro_batch): event for event in first + second if event.computes}
    for i in range(4):
        assert starts[0, "F", i].end <= starts[1, "F", i].start
        assert starts[1, "B", i].end <= starts[0, "B", i].start
