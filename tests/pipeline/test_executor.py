"""Pipelines of one, two and four ranks against one process: losses, every gradient's bits, outputs, messages, times."""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.pipelines import (
    WIDTH,
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
from zero_strategy.pipeline.executor import Computation, Executor, ExecutorHooks
from zero_strategy.pipeline.schedules import Kind
from zero_strategy.pipeline.simulator import Event, simulate

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


def _train(cases: list[Case], ahead: bool = True) -> list[tuple[Tensor | None, dict[str, Tensor]]]:
    """All cases, one after the other; pipelines of one placement are used again for all numbers of micro-batches."""
    rank, found = dist.get_rank(), []
    executors: dict[Placement, tuple[Executor, list[nn.Module]]] = {}
    for case in cases:
        placement = case.placement()
        if placement not in executors:
            stages = build_stages(case, rank)
            executors[placement] = Executor(stages, placement, loss_fn=loss_fn, ahead=ahead), stages
        executor, stages = executors[placement]
        for stage in stages:
            stage.zero_grad()
        run = executor.run(case.schedules()[rank], data_of(case, rank))
        found.append((run.loss, gradients_of(case, rank, stages)))
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_have_the_bits_of_one_process(ranks: Launcher, count: int) -> None:
    cases = _cases(count)
    _compare(cases, ranks(count)(_train, cases))


@pytest.mark.parametrize("count", [2, 4])
def test_receives_posted_when_the_schedule_comes_to_them(ranks: Launcher, count: int) -> None:
    cases = [case for case in _cases(count) if case.micro_batches in (3, 8)]
    _compare(cases, ranks(count)(_train, cases, False))


def _compare(cases: list[Case], results: list[list[tuple[Tensor | None, dict[str, Tensor]]]]) -> None:
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
            executors[place] = Executor(build_stages(case, rank), place, loss_fn=loss_fn)
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
    assert sent == {"first": 1, "activation": 4, "end": 1}
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


class _InPlace(nn.Module):
    """Begins in place, with dropout that keeps everything, and passes a pair on whose second part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, given: Any) -> Any:
        x = given[0] if isinstance(given, tuple) else given
        return self.linear(torch.relu_(x)), self.unused(x)


def _odd_stages(schedule: str, chunks: int) -> tuple[float, list[tuple[Tensor, Tensor | None]]]:
    rank, case = dist.get_rank(), Case(schedule, 2, chunks, 3, False)
    placement = case.placement()
    torch.manual_seed(0)
    stages = [_InPlace() for _ in range(2 * chunks)]
    own = [stages[placement.stage_of(rank, chunk)] for chunk in range(chunks)]
    executor = Executor(
        own, placement, loss_fn=lambda found, labels: (found[0].float() - labels).square().mean(),
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    )  # fmt: skip
    run = executor.run(case.schedules()[rank], iter(_odd_data()) if data_of(case, rank) is not None else None)
    assert run.loss is not None
    return float(run.loss), [(stage.linear.weight.grad, stage.unused.weight.grad) for stage in own]


def _odd_data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)) for _ in range(3)]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_stages_in_place_with_autocast_and_unused_outputs(ranks: Launcher, schedule: str, chunks: int) -> None:
    torch.manual_seed(0)
    stages = [_InPlace() for _ in range(2 * chunks)]
    losses = []
    for inputs, labels in _odd_data():
        value: Any = inputs
        for stage in stages:
            with torch.autocast("cpu", torch.bfloat16):
                value = stage(value)
        losses.append((value[0].float() - labels).square().mean())
        (losses[-1] / 3).backward()
    results = ranks(2)(_odd_stages, schedule, chunks)
    placement = Placement(2, chunks, "v" if chunks == 2 else "loop")
    for rank, (loss, gradients) in enumerate(results):
        assert loss == pytest.approx(float(sum(float(one.detach()) for one in losses)) / 3, abs=1e-6)
        for chunk, (used, unused) in enumerate(gradients):
            wanted = stages[placement.stage_of(rank, chunk)].linear.weight.grad
            assert wanted is not None and torch.equal(used, wanted) and unused is None


class _Watching(ExecutorHooks):
    """Outputs that are alive after each computation."""

    def __init__(self) -> None:
        self.outputs: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def after(self, computation: Computation) -> None:
        self.alive.append(sum(output() is not None for output in self.outputs))


class _Seen(nn.Module):
    """A layer whose backward does not need its output."""

    def __init__(self, hooks: _Watching) -> None:
        super().__init__()
        self.weight, self.hooks = nn.Parameter(torch.ones(WIDTH)), hooks

    def forward(self, x: Tensor) -> Tensor:
        found = x * self.weight
        self.hooks.outputs.append(weakref.ref(found.untyped_storage()))
        return found


def _memory() -> list[int]:
    rank, hooks, placement = dist.get_rank(), _Watching(), Placement(2)
    executor = Executor([_Seen(hooks)], placement, loss_fn=lambda found, labels: found.sum(), hooks=hooks)
    data = iter([(torch.ones(2, WIDTH), torch.ones(1))] * 4)
    executor.run(lower(build_table("gpipe", 2, 4))[rank], data)
    return hooks.alive


def test_outputs_are_let_go_of_when_they_are_sent(ranks: Launcher) -> None:
    first, last = ranks(2)(_memory)
    assert max(first) == 1 and len(first) == 8  # GPipe: four micro-batches in flight, one output not sent yet
    assert max(last) == 0


def _two_pipelines() -> list[tuple[float, dict[str, Tensor]]]:
    world_rank, found = dist.get_rank(), []
    case = Case("1f1b", 2, 1, 4, False)
    group = [world_rank % 2, world_rank % 2 + 2]
    rank = group.index(world_rank)
    stages = build_stages(case, rank)
    executor = Executor(stages, case.placement(), ranks=group, loss_fn=loss_fn)
    for _ in range(2):
        stages[0].zero_grad()
        run = executor.run(case.schedules()[rank], data_of(case, rank))
        assert run.loss is not None
        found.append((float(run.loss), gradients_of(case, rank, stages)))
    return found


def test_two_pipelines_beside_each_other(ranks: Launcher) -> None:
    loss, gradients = expected(Case("1f1b", 2, 1, 4, False))
    for result in ranks(4)(_two_pipelines):
        for found, own in result:
            assert found == pytest.approx(loss, abs=1e-6)
            assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())


class _InFlight(ExecutorHooks):
    """Micro-batches between the forward and the end of the backward in each chunk, counted as they run."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def before(self, computation: Computation) -> None:
        self.now += computation.kind is Kind.FORWARD
        self.most = max(self.most, self.now)

    def after(self, computation: Computation) -> None:
        self.now -= computation.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def _peaks(cases: list[Case]) -> list[tuple[int, int]]:
    """Counted while they run, and in the record."""
    rank, found = dist.get_rank(), []
    for case in cases:
        hooks = _InFlight()
        executor = Executor(build_stages(case, rank), case.placement(), loss_fn=loss_fn, hooks=hooks, record=True)
        events = executor.run(case.schedules()[rank], data_of(case, rank)).events
        assert hooks.now == 0
        held = [{"F": 1, "B": -1, "W": -1}.get(event.kind, 0) for event in events]
        found.append((hooks.most, max(accumulate(held))))
    return found


def test_peaks_of_activations(ranks: Launcher) -> None:
    """GPipe holds all micro-batches; 1F1B as many as the stages that follow; others what the simulator says."""
    cases = [Case(name, 4, chunks, count, False) for name, chunks in _SCHEDULES[:-1] for count in (2, 6)]
    for rank, results in enumerate(ranks(4)(_peaks, cases)):
        for case, (most, recorded) in zip(cases, results, strict=True):
            simulated = simulate(case.schedules()).usage[rank].activations * case.chunks
            assert most == recorded == simulated, (rank, case)
            if case.chunks == 1 and case.schedule in ("gpipe", "1f1b"):
                laws = {"gpipe": case.micro_batches, "1f1b": min(4 - rank, case.micro_batches)}
                assert most == laws[case.schedule], (rank, case)
