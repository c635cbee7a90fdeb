"""The example for `zero-strategy verify` is a factory as the command wants it, and passes."""

from __future__ import annotations

import verify_gpt
from zero_strategy.verify import verify


def test_the_factory() -> None:
    report = verify(verify_gpt.factory, {"stage": 3, "units": {"min_numel": 0}}, ranks=1, steps=2, clip_norm=1.0)
    assert report.passed and report.phases[1].equal == 2, report
