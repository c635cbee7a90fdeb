"""Fifty planted faults: step, slot, rank, unit and kind of each are told from journals, or by training again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.launcher import Launcher
from tests.replay.runs import SLOTS, STEPS, UNITS, Fault, Run, factory, train_all
from zero_strategy.replay import Difference, bisect, replay
from zero_strategy.reproducible.slots import SlotPlaces

KINDS = ("data", "seed", "kernel", "race", "config")
STAGES = (3, 0, 1)


def planted(count: int, world: int, seed: int) -> list[Fault]:
    """Each kind in turn, elsewhere at random."""
    rng, faults = random.Random(seed), []
    for number in range(count):
        keys = {"key": ("lr", "weight_decay", "clip")[number // len(KINDS) % 3]}
        places = {"slot": rng.randrange(SLOTS), "unit": rng.choice(UNITS), "rank": rng.randrange(world)}
        faults.append(Fault(KINDS[number % len(KINDS)], rng.randrange(STEPS), **places, **keys))
    return faults


def owner(world: int, stage: int, slot: int) -> int:
    """The rank that computes a slot."""
    places = SlotPlaces(SLOTS, 1, world, per_step=stage < 2)
    return next(rank for rank in range(world) if slot in places.own(0, rank))


def expect(found: Difference | None, fault: Fault, world: int, stage: int, *, same_ranks: bool) -> None:
    """The difference is the fault, as exactly as can be told.

    `same_ranks`: the other run divides gradients alike, so that the rank of a race is known.
    """
    assert found is not None, fault
    assert (found.step, found.kind) == (fault.step, fault.kind), (found, fault)
    if fault.kind in ("data", "seed", "kernel"):
        assert found.slot == f"slot {fault.slot}", (found, fault)
        assert found.ranks == (owner(world, stage, fault.slot),), (found, fault)
    if fault.kind in ("kernel", "race"):
        assert found.unit == fault.unit, (found, fault)
    if fault.kind == "race" and same_ranks:
        assert found.ranks == (fault.rank,), (found, fault)
    if fault.kind == "config":
        assert ("clipped" if fault.key == "clip" else f".{fault.key} is ") in found.detail, (found, fault)


@pytest.mark.parametrize(("world", "count"), [(2, 28), (4, 12), (1, 10)])
def test_planted_faults_are_told_from_journals_and_by_replays(
    ranks: Launcher, tmp_path: Path, world: int, count: int
) -> None:
    """Against a run of as many ranks, one of one rank at another stage, and some by training again."""
    faults = planted(count, world, seed=world)
    stages = [STAGES[number % 3] for number in range(count)]
    runs = [Run(tmp_path / str(i), fault, {"stage": stage}) for i, (fault, stage) in enumerate(zip(faults, stages))]
    whole = [Run(tmp_path / f"whole-{stage}", config={"stage": stage}) for stage in STAGES]
    ranks(world)(train_all, [*whole, *runs])
    ranks(1)(train_all, [Run(tmp_path / "alone", config={"stage": 2})])
    for number, (run, fault, stage) in enumerate(zip(runs, faults, stages)):
        expect(bisect(run.directory, tmp_path / f"whole-{stage}").difference, fault, world, stage, same_ranks=True)
        expect(bisect(run.directory, tmp_path / "alone").difference, fault, world, stage, same_ranks=False)
        if number < 5 * (world == 2) + 5:
            report = replay(run.directory, STEPS - 1, factory)
            if (fault.kind, fault.key) == ("config", "clip"):
                assert report.equal  # the bound is the journal's
            else:
                expect(report.difference, fault, world, stage, same_ranks=True)
                assert report.stopped == fault.step
