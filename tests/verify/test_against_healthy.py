"""Distributed trainings that are right pass `verify_against`: what differs is rounding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher
from tests.verify.healthy_runs import CASES
from zero_strategy.verify.against import verify_against_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.subject import VerifySettings


def verified_against(numbers: list[int]) -> dict[int, VerifyReport]:
    found = {}
    for number in numbers:
        case = CASES[number]
        settings: dict[str, Any] = {"steps": 2, **case.settings}
        found[number] = verify_against_here(case.factory, case.run, VerifySettings(**settings))
    return found


GROUPS = {
    f"{size} ranks, {part}": [n for n, case in enumerate(CASES) if case.ranks == size][part::parts]
    for size, parts in ((2, 14), (4, 6))
    for part in range(parts)
}


@pytest.mark.parametrize("group", GROUPS)
def test_distributed_trainings_that_are_right_pass(ranks: Launcher, group: str) -> None:
    assert len(CASES) >= 50
    numbers = GROUPS[group]
    first, *others = ranks(CASES[numbers[0]].ranks)(verified_against, numbers)
    assert all(other == first for other in others)
    for number, report in first.items():
        case = CASES[number]
        assert report.passed, f"{case}\n{report}"
        counts = {phase.phase: phase for phase in report.phases}
        assert {"start", "loss", "optimizer state", "parameter"} <= counts.keys()
        assert ("norm" in counts) == ("clip_norm" in case.settings)
        assert all(phase.worst is None or phase.worst <= 8 for phase in report.phases)
