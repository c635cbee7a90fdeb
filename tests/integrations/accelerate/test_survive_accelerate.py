"""A script of Accelerate goes on in the same processes when one dies, with the bits of a run that nothing disturbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.accelerate.surviving_script import train
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.surviving import run_surviving
from tests.launcher import Launcher

pytest.importorskip("torchft")


def undisturbed() -> dict[str, Any]:
    with fresh_state():
        return train(None)


def test_script_goes_on_when_a_process_dies_in_a_step(ranks: Launcher, tmp_path: Path) -> None:
    """Place 1 of 3 dies in the fifth step, in the second epoch; no other step is computed again."""
    plain = ranks(1)(undisturbed)[0]
    done = run_surviving(
        "tests.integrations.accelerate.surviving_script", str(tmp_path), "1", "4", count=3, folder=tmp_path
    )
    assert [each.returncode for each in done] == [0, -9, 0], "\n".join(each.stderr for each in done)
    for place in (0, 2):
        found = json.loads((tmp_path / f"{place}.json").read_text())
        assert (found.pop("beginnings"), found.pop("ranks")) == (2, 2)
        assert found == {key: value for key, value in plain.items() if key in found}
