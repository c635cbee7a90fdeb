"""Simulated times against closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.pipeline.schedules import named
from zero_strategy.pipeline import PipeSchedule, Placement, TrainSchedule, build_table, inference, lower
from zero_strategy.pipeline.instructions import ScheduleError
from zero_strategy.pipeline.simulator import Timeline, Times, simulate

STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (8, 9, 13, 16, 32)


def simulated(
    name: str, stages: int, micro_batches: int, chunks: int | None = None, times: Times | None = None
) -> Timeline:
    return simulate(lower(build_table(name, stages, micro_batches, chunks)), times)


def idle(stages: int, units: int) -> float:
    return (stages - 1) / (units + stages - 1)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_idle_fractions(stages: int, micro_batches: int) -> None:
    """Of the whole time, for all ranks; rank 0's own window is all of it."""
    laws = {("gpipe", 1): micro_batches, ("1f1b", 1): micro_batches, ("zb_h1", 1): 3 * micro_batches}
    for chunks in (2, 3):
        laws["gpipe", chunks] = laws["interleaved_1f1b", chunks] = chunks * micro_batches
        laws["interleaved_zb", chunks] = 3 * chunks * micro_batches
    for (name, chunks), units in laws.items():
        usage = simulated(name, stages, micro_batches, chunks).usage
        expected = idle(stages, units)
        assert [rank.idle for rank in usage] == pytest.approx([expected] * stages), (name, chunks)
        assert usage[0].idle_in_window == pytest.approx(expected)


@pytest.mark.parametrize("times", [Times(2, 3, 1), Times(1, 1, 1, whole=1.5)])
def test_idle_fractions_of_other_times(times: Times) -> None:
    for name in ("gpipe", "1f1b"):
        assert simulated(name, 4, 8, times=times).usage[0].idle == pytest.approx(idle(4, 8))


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_zbv_is_never_idle_in_its_window(stages: int, extra: int) -> None:
    for rank in simulated("zbv", stages, 2 * stages - 1 + extra).usage:
        assert rank.idle_in_window == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 13])
def test_micro_batches_in_flight(stages: int, micro_batches: int) -> None:
    def in_flight(schedules: list[PipeSchedule] | tuple[PipeSchedule, ...]) -> list[int]:
        return [rank.in_flight for rank in simulate(schedules).usage]

    law = [min(stages - stage, micro_batches) for stage in range(stages)]
    assert in_flight(lower(build_table("gpipe", stages, micro_batches))) == [micro_batches] * stages
    assert in_flight(lower(build_table("1f1b", stages, micro_batches))) == law
    assert in_flight([TrainSchedule(micro_batches, stages, stage) for stage in range(stages)]) == law


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 16, 33])
def test_activations_held(stages: int, micro_batches: int) -> None:
    """Zero bubble schedules hold no more on any rank than 1F1B does on its first."""
    first = simulated("1f1b", stages, micro_batches).usage[0].activations
    for name in ("zb_h1", "zbv"):
        assert max(rank.activations for rank in simulated(name, stages, micro_batches).usage) <= first
    if micro_batches % stages == 0:
        usage = simulated("interleaved_1f1b", stages, micro_batches, 2).usage
        law = [min((stages + 2 * (stages - 1 - rank) + 1) / 2, micro_batches) for rank in range(stages)]
        assert [rank.activations for rank in usage] == law
        assert max(rank.activations for rank in simulated("interleaved_zb", stages, micro_batches, 2).usage) <= first


@pytest.mark.parametrize(("name", "chunks"), [*named(3)])
def test_everything_is_computed(name: str, chunks: int) -> None:
    times = Times([1.0 + stage for stage in range(3 * chunks)], 0.5, 0.25, latency=0.1)
    timeline = simulated(name, 3, 5, chunks, times)
    for rank, usage in enumerate(timeline.usage):
        stages = [build_table(name, 3, 5, chunks).placement.stage_of(rank, chunk) for chunk in range(chunks)]
        assert usage.busy == pytest.approx(5 * sum(1.0 + stage + 0.75 for stage in stages))
        events = timeline.computations(rank)
        assert all(a.end <= b.start for a, b in pairwise(events))


def test_deepspeeds_schedule_is_1f1b() -> None:
    for latency in (0.0, 0.25):
        theirs = simulate([TrainSchedule(8, 4, stage) for stage in range(4)], Times(latency=latency))
        ours = simulated("1f1b", 4, 8, times=Times(latency=latency))
        assert theirs.makespan >= ours.makespan  # they send a step later
    assert simulate([TrainSchedule(8, 4, stage) for stage in range(4)]).makespan == simulated("1f1b", 4, 8).makespan


def test_inference() -> None:
    assert simulate(lower(inference(Placement(4), 8))).makespan == 8 + 3
    assert simulate(lower(inference(Placement(4, 2), 8))).makespan == 2 * 8 + 3
    assert simulate(lower(inference(Placement(4, 2, "v"), 8))).makespan == 2 * 8 + 2 * 3


def test_latency_is_paid_once_per_stage_and_direction() -> None:
    assert simulated("gpipe", 4, 1, times=Times(latency=0.5)).makespan == 4 * 3 + 2 * 3 * 0.5


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (Times(forward=[1.0, 2.0]), "forward: 2 times for 3 stages"),
        (Times(weight=-1.0), "weight: times are zero or more, not -1.0"),
        (Times(backward=float("nan")), "backward: times"),
        (Times(latency=-1.0), "latency: times"),
    ],
)
def test_no_such_times(times: Times, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated("1f1b", 3, 4, times=times)


def test_ranks_that_wait_for_what_is_not_sent() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, step .*BackwardPass"):
        simulate([TrainSchedule(2, 2, 0), EndsEarly(2, 2, 1)])


class EndsEarly(TrainSchedule):
    def steps(self):  # type: ignore[no-untyped-def]
        return iter(list(super().steps())[:2])
