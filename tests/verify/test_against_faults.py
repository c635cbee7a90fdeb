"""Silent faults of parallel trainings: `verify_against` finds each, and names step, phase, tensor, ranks and kind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher
from tests.verify.parallel_faults import FAULTS
from zero_strategy.verify.against import verify_against_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.subject import VerifySettings

STEPS = 2


def with_faults(names: list[str]) -> dict[str, VerifyReport]:
    found = {}
    for name in names:
        case = FAULTS[name]
        settings: dict[str, Any] = {"steps": STEPS, **case.settings}
        found[name] = verify_against_here(case.factory, case.run, VerifySettings(**settings))
    return found


@pytest.mark.parametrize("part", range(3))
def test_silent_faults_of_parallel_trainings_are_found_and_named(ranks: Launcher, part: int) -> None:
    assert len(FAULTS) >= 30
    first, second = ranks(2)(with_faults, list(FAULTS)[part::3])
    assert first == second
    wrong = {}
    for name, report in first.items():
        case, found = FAULTS[name], report.first
        said = found is not None and (
            (found.step, found.phase, found.rank) == (-1 if case.phase == "start" else case.step, case.phase, case.rank)
            and case.name in found.name
            and case.hint in found.hint
        )
        if not said:
            wrong[name] = f"{report}\nwanted {case}"
        elif found is not None and found.times is not None and found.times < 50:
            wrong[name] = f"only {found.times:.3g} times what re-ordered summation explains: {found}"
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())
