"""Ranks of pipelines, experts and divided layers die; the others wait for them, and end in the bits of before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Launcher
from tests.survive import divided_deaths, pipeline_deaths
from tests.survive.deaths import Deaths, Training
from tests.survive.test_agent import start, wait_for
from tests.survive.test_deaths import digests, kept_in_memory, run

pytest.importorskip("torchft")

MODULE, DIVIDED = "tests.survive.pipeline_deaths", "tests.survive.divided_deaths"
STAGES = {"pipeline": {"stages": 2}}


def _undisturbed(training: Training, folder: str, config: dict[str, Any], steps: int) -> str:
    return training(None, config, steps, Deaths(Path(folder), []), lambda **_: None)


def told(folder: Path) -> list[dict[str, Any]]:
    """Lines that ranks have told at the ends of steps."""
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def test_deaths_of_stages(ranks: Launcher, tmp_path: Path) -> None:
    """In a forward, a backward, a step, a copy, and where the new one loads it."""
    config = {"stage": 1, **STAGES}
    deaths = [[1, "forward", 1], [2, "backward", 0], [3, "before the step", 1], [4, "copy", 0], [4, "restore", 1]]
    said = run(tmp_path, config, deaths, 2, 6, MODULE)
    assert len(list(tmp_path.glob("death*"))) == len(deaths), said
    # Dropout draws from each rank's generator, which the copy has as well.
    assert digests(tmp_path) == set(ranks(2)(_undisturbed, pipeline_deaths.train, str(tmp_path), config, 6))


def test_deaths_of_copies_of_a_pipeline(ranks: Launcher, tmp_path: Path) -> None:
    """Two at once, one of each stage; with slots the bits are those of one copy, too."""
    config = {"stage": 3, "reproducible": 4, **STAGES}
    run(tmp_path, config, [[2, "backward", 1], [2, "backward", 2], [5, "copy", 0]], 4, 8, MODULE)
    assert digests(tmp_path) == set(ranks(2)(_undisturbed, pipeline_deaths.train, str(tmp_path), config, 8))


@pytest.mark.parametrize("mesh", ["expert", "tensor"])
def test_deaths_of_ranks_that_divide_layers(ranks: Launcher, tmp_path: Path, mesh: str) -> None:
    config = {"stage": 2, "mesh": {mesh: 2}}
    deaths = [[1, "forward", 1], [2, "backward", 0], [3, "before the step", 1], [4, "copy", 0]]
    said = run(tmp_path, config, deaths, 2, 6, DIVIDED)
    assert len(list(tmp_path.glob("death*"))) == len(deaths), said
    assert digests(tmp_path) == set(ranks(2)(_undisturbed, divided_deaths.train, str(tmp_path), config, 6))


def test_deaths_before_anybody_knows_the_training(ranks: Launcher, tmp_path: Path) -> None:
    """Others wait for such ranks where groups are made, and for the engine."""
    config = {"stage": 2, **STAGES}
    said = run(tmp_path, config, [[0, "begin", 1], [0, "made", 0]], 2, 3, MODULE)
    assert len(list(tmp_path.glob("death*"))) == 2, said
    assert digests(tmp_path) == set(ranks(2)(_undisturbed, pipeline_deaths.train, str(tmp_path), config, 3))


def test_without_an_agent_whole_copies_go_on(ranks: Launcher, tmp_path: Path) -> None:
    """Of three that are left two are a pipeline; the third one ends when they have, and says who is missing."""
    config = {"stage": 1, "reproducible": 4, **STAGES}
    agent = start(tmp_path, 60, [[30, "forward", 1]], 4, {**config, "survive": {"wait_seconds": 0.5}}, MODULE)
    wait_for(lambda: told(tmp_path))
    agent.kill()
    _, said = agent.communicate(timeout=100)
    assert digests(tmp_path) == set(ranks(2)(_undisturbed, pipeline_deaths.train, str(tmp_path), config, 60)), said
    assert {each["ranks"] for each in told(tmp_path) if each["step"] > 30} == {2}
    assert "1 of 2 ranks are there that the training needs (pipeline.stages 2, reproducible.slots 4): place " in said
    assert "place 1 (process " in said and "survive.wait_seconds, 0.5, are over" in said
    wait_for(lambda: f"zero_strategy.{tmp_path.name}" not in kept_in_memory())
