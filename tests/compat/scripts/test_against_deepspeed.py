"""The same script and JSON under the real DeepSpeed and here; the schedules' values of both."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.scripts import deepspeed_workers, old_script
from tests.convert.interop.deepspeed_ranks import run
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed import scripts
from zero_strategy.compat.deepspeed.schedules import SCHEDULES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

STEPS, ACCUMULATION = 10, 2
ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.005, "warmup_max_lr": 0.02, "warmup_num_steps": 6}}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAM,
        **more,
    }


CONFIGS = [
    config(0, gradient_clipping=0.0),
    config(1),  # clipped at 1.0, DeepSpeed 0.19.8's default
    config(2, gradient_clipping=0.2, scheduler=WARMUP),
    config(3, gradient_clipping=0.2, scheduler=WARMUP),
]


def here(paths: list[str]) -> list[dict[str, Any]]:
    argv = ["--steps", str(STEPS * ACCUMULATION), "--deepspeed_config"]
    return [old_script.main(scripts, [*argv, path]) | {"engine": None} for path in paths]


@pytest.mark.parametrize("world", [1, 2])
def test_ten_steps_have_the_same_losses(ranks: Launcher, tmp_path: Path, world: int) -> None:
    paths = []
    for number, values in enumerate(CONFIGS):
        paths.append(str(tmp_path / f"{number}.json"))
        Path(paths[-1]).write_text(json.dumps(values))
    argument = {"configs": paths, "steps": STEPS * ACCUMULATION}
    theirs = run("tests.compat.scripts.deepspeed_workers:train", world, argument, timeout=110)
    for mine, other in zip(ranks(world)(here, paths), theirs, strict=True):
        for found, expected, values in zip(mine, other, CONFIGS, strict=True):
            assert len(found["losses"]) == STEPS * ACCUMULATION
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), values
            assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12), values
            assert tuple(found["steps"]) == tuple(expected["steps"]), values
            if expected["norm"] is not None:
                assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4), values


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": [0.5, 0.3], "cycle_first_step_size": 7}
WARM = {"warmup_num_steps": 8, "warmup_min_lr": 0.01}
SCHEDULE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("LRRangeTest", {"lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0, "lr_range_test_min_lr": [0.1, 0.2]}),
    ("LRRangeTest", {"lr_range_test_step_size": 5, "lr_range_test_staircase": True}),
    ("OneCycle", CYCLE),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 11, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4}),
    ("OneCycle", {**CYCLE, "decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}),
    ("OneCycle", {**CYCLE, "decay_step_size": 0, "decay_lr_rate": 0.5, "cycle_min_mom": 0.6, "cycle_max_mom": 0.95}),
    ("OneCycle", {**CYCLE, "cycle_momentum": False}),
    *[("WarmupLR", {**WARM, "warmup_type": kind, "warmup_max_lr": 0.3}) for kind in ("log", "linear")],
    ("WarmupLR", {"warmup_num_steps": 1}),
    *[("WarmupDecayLR", {**WARM, "warmup_type": kind, "total_num_steps": 25}) for kind in ("log", "linear")],
    ("WarmupCosineLR", {"warmup_num_steps": 8, "total_num_steps": 25}),
    ("WarmupCosineLR", {"warmup_num_steps": 8, "total_num_steps": 9, "warmup_type": "linear", "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"warmup_num_steps": 8, "total_num_steps": 8, "cos_min_ratio": 0.1}),
]


def test_schedules_have_the_same_values() -> None:
    argument = {"cases": SCHEDULE_CASES, "steps": 40}
    [theirs] = run("tests.compat.scripts.deepspeed_workers:schedules", 1, argument, timeout=60)
    for (name, options), expected in zip(SCHEDULE_CASES, theirs, strict=True):
        found = deepspeed_workers.schedule(SCHEDULES[name], options, 40)
        for step, (mine, other) in enumerate(zip(found, expected, strict=True)):
            for group, values in zip(mine, other, strict=True):
                assert group == pytest.approx(values, rel=1e-12, abs=1e-15), (name, options, step)
