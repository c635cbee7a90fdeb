"""Mutation test of `verify`: it catches every seeded defect, and names a right tensor, phase and rank."""

from __future__ import annotations

import pytest

from tests.launcher import Launcher
from tests.verify.defects import DEFECTS
from tests.verify.subjects import tiny
from zero_strategy.config import load_config
from zero_strategy.verify import verify_here
from zero_strategy.verify.compare import VerifyReport
from zero_strategy.verify.subject import VerifySettings

STEPS = 2


def with_defects(tolerance: float | None, names: list[str]) -> dict[str, VerifyReport]:
    found = {}
    for name in names:
        case = DEFECTS[name]
        config = load_config(units={"min_numel": 0}, **case.config)
        settings = VerifySettings(steps=STEPS, tolerance=tolerance, **case.settings)
        found[name] = verify_here(tiny, config, settings, case.run)
    return found


@pytest.mark.parametrize("tolerance", [None, 8.0], ids=["by bits", "within rounding"])
def test_verify_every_defect_is_caught(ranks: Launcher, tolerance: float | None) -> None:
    assert len(DEFECTS) >= 20
    first, second = ranks(2, timeout=150)(with_defects, tolerance, list(DEFECTS))
    assert first == second
    wrong = {}
    for name, report in first.items():
        case = DEFECTS[name]
        found = report.first
        if found is None or found.phase != case.phase or case.name not in found.name or found.rank not in case.ranks:
            wrong[name] = f"{report}, wanted {case.phase} of {case.name!r} on {case.ranks}"
        elif found.times is not None and found.times < 50:
            wrong[name] = f"only {found.times:.3g} times what re-ordered summation explains: {found}"
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())
