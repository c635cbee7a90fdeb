"""Numbers of ranks that can go on, and the wait of those who are too few."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from tests.launcher import Launcher
from tests.survive.pipeline_deaths import layers
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.survive.layout import UNKNOWN, Layout, layout_of
from zero_strategy.survive.membership import Member, World
from zero_strategy.survive.waiting import RanksMissingError, wait_to_fit
from zero_strategy.watchdog.peers import own_card

SLOTS, STAGES = Layout(8, 1), Layout(8, 2, 2)
FIXED = Layout(0, 2, 2, ranks=4, why="pipeline.stages 2")


@pytest.mark.parametrize(
    "layout, fitting",
    [
        (UNKNOWN, [1, 2, 3, 4, 5]), (SLOTS, [1, 2, 2, 4, 4]), (STAGES, [0, 2, 2, 4, 4]), (FIXED, [0, 0, 0, 4, 4]),
        # Six slots and replicas of two: three ranks would be no replicas.
        (Layout(6, 1, 2), [0, 2, 2, 2, 2]), (Layout(6, 2, 4), [0, 0, 0, 4, 4]),
    ],
    ids=["unknown", "slots", "stages", "fixed", "replicas", "replicas of stages"],
)  # fmt: skip
def test_numbers_that_fit(layout: Layout, fitting: list[int]) -> None:
    assert [layout.fitting(ranks) for ranks in range(1, 6)] == fitting
    assert next(ranks for ranks, found in enumerate(fitting, 1) if found) == layout.least


def layouts(config: dict[str, object]) -> Layout:
    module = PipelineModule(layers(), 2, loss_fn=lambda outputs, labels: outputs.sum())
    with PipelineEngine(module, config) as engine:
        return layout_of(engine, engine.mesh.world_group.world_size)


def test_layouts_of_pipelines(ranks: Launcher) -> None:
    assert set(ranks(4)(layouts, {})) == {Layout(0, 2, 2, 4, "pipeline.stages 2")}
    assert set(ranks(4)(layouts, {"reproducible": 8, "mesh": {"replicate": 2}})) == {
        Layout(8, 2, 4, 0, "pipeline.stages 2, mesh.replicate 2, reproducible.slots 8")
    }


def world(places: Sequence[int], own: int, layout: Layout = FIXED) -> World:
    """Those who are there, of whom the first knows the training."""
    members = [
        Member(f"{place:06d}:x", own_card(), "10.0.0.7", 1, "", 1, UNKNOWN if number else layout)
        for number, place in enumerate(places)
    ]
    return World(1, places.index(own), members)


def test_those_who_are_left_say_who_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([world([0, 1, 3], 1), world([0, 1], 1), world([0, 1], 1), world([0, 1, 2, 3], 1)])
    before = world([0, 1, 2, 3], 1).members
    with caplog.at_level(logging.WARNING):
        found = wait_to_fit(next(answers), lambda: next(answers), 4, before, 60.0)
    assert found.size == 4 and next(answers, None) is None
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("3 of 4 ranks are there that the training needs (pipeline.stages 2): place 2 (process ")
    assert "of 10.0.0.7) is missing since " in first and first.endswith("waiting for up to 60 s")
    assert second.startswith("2 of 4 ranks") and "place 2 (process" in second and "place 3 (process" in second


def test_a_wait_that_is_over_says_so() -> None:
    alone = world([0, 1, 2], 0)
    with pytest.raises(RanksMissingError, match=r"place 3 is missing since .*; survive.wait_seconds, 0, are over"):
        wait_to_fit(alone, lambda: alone, 4, [], 0.0)


def test_one_that_others_train_without_waits_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([world([0, 1, 2], 2, STAGES), world([0, 2], 2, STAGES)])
    found = wait_to_fit(next(answers), lambda: next(answers), 4, [], 0.0)
    assert found.rank == 1 and not caplog.records
