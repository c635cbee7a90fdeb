"""The Trainer goes on in the same processes when one dies, with the bits of a training that nothing disturbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.surviving_script import train
from tests.integrations.surviving import run_surviving
from tests.launcher import Launcher

pytest.importorskip("torchft")
SCRIPT = "tests.integrations.huggingface.surviving_script"


def undisturbed(folder: str, case: str) -> dict[str, Any]:
    with fresh_state():
        return train(folder, case, False)


def taken_out(log: list[dict[str, float]]) -> list[float]:
    return [entry.pop("eval_loss") for entry in log if "eval_loss" in entry]


@pytest.mark.parametrize(("case", "victim", "step"), [("llama", 1, 3), ("gpt2", 0, 4)])
def test_trainer_goes_on_when_a_process_dies_in_a_step(
    ranks: Launcher, tmp_path: Path, case: str, victim: int, step: int
) -> None:
    """One step is computed again, and each is logged once; model and callbacks are the same objects."""
    plain = ranks(1)(undisturbed, str(tmp_path / "plain"), case)[0]
    words = (str(tmp_path), str(victim), str(step), case)
    done = run_surviving(SCRIPT, *words, count=3, folder=tmp_path)
    codes = [-9 if place == victim else 0 for place in range(3)]
    assert [each.returncode for each in done] == codes, "\n".join(each.stderr for each in done)
    steps = plain.pop("seen")
    assert plain["counted"] == steps and plain.pop("ranks") == 1
    evaluations = taken_out(plain["log"])
    for place in {0, 1, 2} - {victim}:
        found = json.loads((tmp_path / f"{place}.json").read_text())
        assert (found.pop("ranks"), found.pop("seen")) == (2, steps + 1)
        # Evaluations are no slots: a mean is that of a batch, which other ranks divide in another way.
        assert taken_out(found["log"]) == pytest.approx(evaluations, rel=0.1)
        assert found == plain, [place, found["log"], plain["log"]]
