"""The parts of a step, by a clock that says what the test wants."""

from __future__ import annotations

import itertools

import pytest

from zero_strategy.diagnostics.step_clock import MOST_MOVED, MOST_SECTIONS, Moved, StepClock, Traffic, flows


class Ticks:
    """Every look at it is a second later than the one before."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def now(self) -> float:
        return float(next(self._next))

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_the_innermost_span_has_the_time() -> None:
    clock = StepClock(Ticks())
    clock.start("data_wait")  # 0
    clock.turn("compute")  # 1
    clock.enter("all_gather")  # 2
    clock.enter("disk")  # 3
    clock.leave()  # 4
    clock.leave()  # 5
    clock.turn("optimizer")  # 6
    clock.enter("disk")  # 7
    clock.leave()  # 8
    total, parts = clock.end()  # 9, and one where the end turns the phase
    assert parts == {"data_wait": 1, "compute": 2, "all_gather": 2, "disk": 2, "optimizer": 2, "other": 1}
    assert total == sum(parts.values()) == 10


def test_a_step_with_a_closure_waited_for_its_data() -> None:
    clock = StepClock(Ticks())
    clock.start("compute")
    clock.turn_later()
    clock.turn("optimizer")
    clock.turn("compute")
    clock.turn("optimizer")
    assert clock.end() == (6.0, {"compute": 2, "data_wait": 1, "optimizer": 2, "other": 1})


AFTER = [("compute", "data_wait"), ("evaluation", "data_wait"), ("optimizer", "other")]


@pytest.mark.parametrize(("then", "part"), AFTER)
def test_a_gap_after_a_backward_is_what_follows_it(then: str, part: str) -> None:
    clock = StepClock(Ticks())
    clock.start("compute")
    clock.turn_later()
    clock.enter("control")
    clock.leave()
    clock.turn(then)  # type: ignore[arg-type]
    _, parts = clock.end()
    assert parts.pop(part) - (then == "other") == 2 + (part == "other")
    assert parts.pop("control") == 1


def test_a_clock_that_is_not_running_measures_nothing() -> None:
    clock = StepClock(Ticks())
    assert not clock.running
    clock.leave()
    clock.start("compute")
    assert clock.running
    clock.end()
    assert not clock.running


def test_a_step_may_have_any_number_of_sections() -> None:
    clock, traffic = StepClock(Ticks()), Traffic()
    clock.start("evaluation")
    for number in range(3 * MOST_SECTIONS):
        clock.enter("all_gather")
        clock.leave()
        traffic.add(Moved("all_gather", 2, float(number), number + 0.5))
    assert len(clock._sections) <= MOST_SECTIONS + 1 and len(traffic._moved) < MOST_MOVED
    parts = clock.end()[1]
    assert parts == {"evaluation": 3 * MOST_SECTIONS + 1, "all_gather": 3 * MOST_SECTIONS, "other": 1}
    assert traffic.take()["all_gather"] == (3 * MOST_SECTIONS, 6 * MOST_SECTIONS, 1.5 * MOST_SECTIONS)
    assert not traffic.take()


def test_what_overlaps_takes_its_time_once() -> None:
    moved = [Moved("disk_read", 5, 0.0, 2.0), Moved("copy", 1, 0.0, 0.0), Moved("disk_read", 7, 1.0, 3.0)]
    moved.append(Moved("disk_read", 8, 5.0, 6.0))
    found = flows(moved)
    assert list(found) == ["copy", "disk_read"]
    assert found["disk_read"] == (3, 20, 4.0) and found["disk_read"].bytes_per_second == 5.0
    assert found["copy"].bytes_per_second is None
