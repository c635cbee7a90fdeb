"""Stalls, steps computed again and goodput of runs whose times are made up."""

from __future__ import annotations

import pytest

from zero_strategy.survive.history import Beginning, History, Left

THREE = ["000000:a", "000001:a", "000002:a"]
TORN = Left("rank 1 is gone", torn=True)


def begun(*copies: float, names: list[str] = THREE) -> History:
    """A run that begins at 0, and has copied its steps 1, 2, ... at these times."""
    history = History()
    history.begin(0.0, len(names), names, Left("", torn=False))
    for step, time in enumerate(copies, start=1):
        history.copied(step, time)
    return history


def test_a_death_and_the_place_taken_again() -> None:
    history = History()
    history.begin(0.0, 3, THREE, Left("", torn=False))
    (first,) = history.copied(1, 10.0)
    assert (first.before, first.after, first.came, first.since, first.stall) == (0, 3, [0, 1, 2], 10.0, 0.0)
    assert not history.copied(2, 11.0) and not history.copied(3, 12.0)
    assert history.metrics() == {"deaths": 0, "stall_seconds": 0.0, "goodput": 1.0}

    left = ["000000:a", "000002:a"]
    history.begin(14.0, 2, left, TORN)
    assert history.metrics()["deaths"] == 1
    history.went_back(3)
    (death,) = history.copied(4, 15.5)
    assert death == Beginning(
        number=2, time=14.0, step=3, why="rank 1 is gone", before=3, after=2, went=[1], came=[], waiting=0,
        since=12.0, stall=3.5, lost=3.5, again=1,
    )  # fmt: skip
    history.copied(5, 16.5)
    history.begin(17.0, 3, ["000000:a", "000001:b", "000002:a"], Left("after step 5 1 came", torn=False))
    history.went_back(5)
    (taken,) = history.copied(6, 18.0)
    assert (taken.before, taken.after, taken.went, taken.came) == (2, 3, [], [1])
    assert (taken.stall, taken.again) == (1.5, 0)
    # 8 s since the first copy, of which 3.5 and 1.5 are lost.
    assert history.metrics() == {"deaths": 1, "stall_seconds": 5.0, "goodput": 3 / 8}


def test_beginnings_that_come_to_no_copy_share_the_stall() -> None:
    history = begun(10.0, 11.0)
    history.begin(13.0, 2, THREE[:2], TORN)
    history.begin(16.0, 1, THREE[:1], Left("rank 1 is gone, too", torn=True))
    history.went_back(2)
    one, other = history.copied(3, 17.0)
    assert [(each.since, each.stall, each.again, each.went) for each in (one, other)] == [
        (11.0, 5.0, 0, [2]),
        (16.0, 1.0, 1, [1]),
    ]
    assert history.goodput == 1 - 6 / 7


def test_a_death_before_the_first_copy() -> None:
    """The time of the run begins with the ranks that were torn, as nothing counts before."""
    history = History()
    history.begin(1.0, 3, THREE, Left("", torn=False))
    history.begin(4.0, 2, THREE[:2], TORN)
    first, death = history.copied(1, 9.0)
    assert (first.stall, first.since) == (0.0, 1.0)
    assert (death.since, death.stall, death.again) == (1.0, 8.0, 1)
    history.copied(2, 11.0)
    assert history.goodput == 1 - 8 / 10


@pytest.mark.parametrize(("back", "again"), [(9, 2), (10, 1)])
def test_a_damaged_copy_costs_one_step_more(back: int, again: int) -> None:
    history = begun(*(float(step) for step in range(1, 11)))
    history.begin(11.0, 2, THREE[:2], TORN)
    history.went_back(back)
    (death,) = history.copied(back + 1, 13.0)
    assert (death.stall, death.lost, death.again) == (3.0, 3.0, again)


def test_steps_since_a_checkpoint_are_lost_until_the_run_is_where_it_was() -> None:
    history = begun(*(float(step) for step in range(1, 11)))
    history.begin(12.0, 2, THREE[:2], TORN)
    (soon,) = history.copied(9, 15.0)  # no copy was whole: the function has loaded a checkpoint of step 8
    assert (soon.stall, soon.lost, soon.again) == (5.0, 5.0, 3)
    (later,) = history.copied(10, 17.0)
    assert (later.number, later.stall, later.lost) == (soon.number, 5.0, 7.0)
    assert not history.copied(11, 18.0)
    assert history.goodput == 1 - 7 / 17


def test_a_death_on_the_way_back_counts_no_second_twice() -> None:
    history = begun(*(float(step) for step in range(1, 11)))
    history.begin(12.0, 2, THREE[:2], TORN)
    history.copied(8, 14.0)
    history.begin(15.0, 1, THREE[:1], TORN)
    first, second = history.copied(9, 16.0)
    assert (first.stall, first.lost, second.since, second.stall) == (4.0, 4.0, 14.0, 2.0)
    (caught_up,) = history.copied(10, 18.0)
    assert caught_up.lost == 4.0
    assert history.metrics()["stall_seconds"] == 4.0 + 4.0 and history.goodput == 1 - 8 / 17


def test_what_follows_a_step_is_no_step_again() -> None:
    """A copy is taken before a validation, another one after it: a death between them repeats the validation alone."""
    history = begun(10.0, 11.0)
    history.copied(3, 12.0, complete=False)
    history.begin(13.0, 2, THREE[:2], TORN)
    history.went_back(3)
    (death,) = history.copied(3, 14.0)
    assert (death.stall, death.again) == (2.0, 0)


def test_the_newest_knowledge_goes_on_whoever_is_left() -> None:
    """The first rank is a new process: a rank that has seen it all tells, and the text is that of the death."""
    history = begun(10.0, 11.0)
    told = [
        History().told(Left("", torn=False)),
        history.told(Left("Connection closed by peer", torn=True)),
        history.told(Left("rank 2 has left: rank 0 is gone", torn=True)),
        history.told(Left("rank 0 is gone", torn=True)),
    ]
    agreed = History.agreed(told, 13.0, 2, ["000000:b", "000001:a"])
    assert History.from_text(agreed.text()) == agreed
    (death,) = agreed.copied(3, 14.0)
    assert (death.why, death.went, death.came) == ("rank 0 is gone", [0, 2], [0])
    assert (death.since, death.stall) == (11.0, 3.0)


def test_all_processes_died_and_others_found_their_copy() -> None:
    """The copy tells of the run; the new ranks are one more beginning of it."""
    history = begun(10.0)
    kept = history.kept(2, 11.0, complete=True)
    history.copied(2, 11.0)
    assert kept == history.text()
    fresh = History()
    fresh.begin(20.0, 1, ["000001:b"], Left("", torn=False))
    known = fresh.following(kept)
    known.went_back(2)
    (death,) = known.copied(3, 21.0)
    assert (death.number, death.went, death.came, death.stall, death.again) == (2, [0, 1, 2], [1], 10.0, 1)
    assert known.metrics() == pytest.approx({"deaths": 3, "stall_seconds": 10.0, "goodput": 1 / 11})
    # Those who were there know more than a copy.
    assert known.following(kept) is known


def test_all_processes_died_after_the_first_copy_of_a_beginning() -> None:
    """The copy's history has that beginning at hand: its stall ends with the copy."""
    history = begun(10.0, 11.0)
    history.begin(12.0, 2, THREE[:2], TORN)
    kept = history.kept(3, 14.0, complete=True)
    fresh = History()
    fresh.begin(20.0, 1, ["000000:b"], Left("", torn=False))
    death, all_died = fresh.following(kept).copied(4, 22.0)
    assert (death.since, death.stall, all_died.since, all_died.stall) == (11.0, 3.0, 14.0, 8.0)


def test_places_that_wait_are_no_deaths() -> None:
    """Three are left of four; two divide the slots."""
    four = [*THREE, "000003:a"]
    history = begun(10.0, names=four)
    history.begin(12.0, 2, THREE, TORN)
    (death,) = history.copied(2, 13.0)
    assert (death.before, death.after, death.went, death.waiting) == (4, 2, [3], 1)
