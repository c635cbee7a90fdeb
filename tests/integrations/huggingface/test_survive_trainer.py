"""The Trainer goes on in the same processes when one dies, with the bits of a training that nothing disturbs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.slots import trainer_of
from tests.integrations.huggingface.surviving_script import Dies, train
from tests.integrations.surviving import run_surviving
from tests.launcher import Launcher

pytest.importorskip("torchft")
SCRIPT = "tests.integrations.huggingface.surviving_script"


def undisturbed(folder: str, case: str) -> dict[str, Any]:
    with fresh_state():
        return train(folder, case, False, Dies())


def refused(folder: str, more: dict[str, Any], launched: bool) -> str:
    with fresh_state():
        dist.destroy_process_group()
        if not launched:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
        try:
            trainer_of({"stage": 1, "survive": True}, folder, **more).train()
        except ValueError as error:
            return str(error)
        return "trained"


@pytest.mark.parametrize(
    ("more", "launched", "told"),
    [
        ({"slots": 0}, False, ["survive.enabled", "without reproducible.slots"]),
        ({"gradient_accumulation_steps": 4}, False, ["gradient_accumulation_steps=4", "leave it out"]),
        ({}, False, ["TORCHFT_LIGHTHOUSE", "zero-strategy run"]),
        ({}, True, ["process group already", "zero-strategy run", "not by torchrun"]),
    ],
    ids=["slots", "accumulation", "no launcher", "torchrun"],
)
def test_trainer_refuses_what_cannot_go_on(
    ranks: Launcher, tmp_path: Path, more: dict[str, Any], launched: bool, told: list[str]
) -> None:
    found = ranks(1)(refused, str(tmp_path), more, launched)[0]
    assert all(part in found for part in told), found


def taken_out(log: list[dict[str, float]]) -> list[float]:
    return [entry.pop("eval_loss") for entry in log if "eval_loss" in entry]


DEATHS: list[tuple[str, dict[str, tuple[str, int]], int]] = [
    ("llama", {"1": ("on_pre_optimizer_step", 3), "0": ("on_epoch_end", 6)}, 2),
    ("gpt2", {"0": ("on_save", 3), "2": ("on_train_end", 6)}, 1),
]
"""Case; by place, the event and the step in which it dies; steps that are computed again."""


@pytest.mark.parametrize(("case", "deaths", "again"), DEATHS, ids=["llama", "gpt2"])
def test_trainer_goes_on_when_processes_die(
    ranks: Launcher, tmp_path: Path, case: str, deaths: dict[str, tuple[str, int]], again: int
) -> None:
    """Of 3 processes one is left; each step is logged once, and model and callbacks are the same objects."""
    plain = ranks(1)(undisturbed, str(tmp_path / "plain"), case)[0]
    done = run_surviving(SCRIPT, str(tmp_path), case, json.dumps(deaths), count=3, folder=tmp_path)
    codes = [-9 if str(place) in deaths else 0 for place in range(3)]
    assert [each.returncode for each in done] == codes, "\n".join(each.stderr for each in done)
    (left,) = tmp_path.glob("?.json")
    found = json.loads(left.read_text())
    assert plain["counted"] == plain["seen"]
    assert (found.pop("begun"), found.pop("seen")) == (3, plain.pop("seen") + again)
    # Evaluations are no slots: a mean is that of a batch, which other ranks divide in another way.
    assert taken_out(found["log"]) == pytest.approx(taken_out(plain["log"]), rel=0.1)
    assert plain.pop("begun") == 1 and found == plain, [found["log"], plain["log"]]


def test_trainer_takes_a_new_process_in(ranks: Launcher, tmp_path: Path) -> None:
    """One takes the place of another that died before the first step: it has the others' log, and computes steps."""
    plain = ranks(1)(undisturbed, str(tmp_path / "plain"), "llama")[0]
    deaths = json.dumps({"1": ("on_train_begin", 0)})
    words = (str(tmp_path), "llama", deaths, "waits")
    done = run_surviving(SCRIPT, *words, count=2, folder=tmp_path, lives=2)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    steps, _ = plain.pop("seen"), plain.pop("begun")
    seen = []
    for place in (0, 1):
        found = json.loads((tmp_path / f"{place}.json").read_text())
        seen.append((found.pop("begun"), found.pop("seen")))
        assert taken_out(found["log"]) == [] and found == plain, [place, found["log"], plain["log"]]
    # It comes in when the other begins anew, or after some steps.
    assert seen[0] in [(2, steps), (3, steps)] and seen[1][0] == 1 and 0 < seen[1][1] <= steps
