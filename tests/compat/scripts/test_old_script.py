"""A script written for DeepSpeed 0.3 gives plain torch's losses and weights, on one rank and two, at every stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_strategy
from tests.compat.scripts import old_script, plain
from tests.launcher import Launcher
from tests.warm import plain_environment, run_warm_ranks
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine

STEPS, MICRO, ACCUMULATION, CLIP = 3, 2, 2, 0.5
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1}


@pytest.fixture
def alone() -> Iterator[None]:
    """`initialize` starts a process group of one, which other tests shall not see."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def settings(stage: int, ours: bool, **more: Any) -> dict[str, Any]:
    native = {"stage": stage, "units": {"min_numel": 0}}
    zero: dict[str, Any] = native if ours else {"zero_optimization": {"stage": stage}}
    return {
        **zero,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**OPTIONS, "betas": [0.8, 0.9]}},
        **more,
    }


def write(folder: str, stage: int, ours: bool, **more: Any) -> str:
    path = Path(folder) / f"{stage}-{ours}-{dist.get_rank() if dist.is_initialized() else 0}.json"
    path.write_text(json.dumps(settings(stage, ours, **more)))
    return str(path)


def run(stage: int, folder: str, ours: bool) -> dict[str, Any]:
    argv = ["--deepspeed", "--deepspeed_config", write(folder, stage, ours), "--steps", str(STEPS * ACCUMULATION)]
    found = old_script.main(zero_strategy.compat.deepspeed.scripts, argv)
    engine: ScriptEngine = found.pop("engine")
    assert engine.zero_optimization_stage() == stage and engine.zero_optimization() == (stage > 0)
    world = dist.get_world_size()
    assert engine.train_batch_size() == MICRO * ACCUMULATION * world and engine.world_size == world
    return {**found, "weights": {name: value.clone() for name, value in engine.state_dict().items()}}


def run_all(folder: str) -> list[dict[str, Any]]:
    return [run(stage, folder, ours) for stage, ours in CASES]


CASES = [(0, False), (1, True), (2, True), (3, True), (3, False)]


def check(found: dict[str, Any], expected: dict[str, Any], rank: int, world: int) -> None:
    assert found["losses"] == pytest.approx(expected["losses"][rank], abs=1e-6)
    for name, value in expected["weights"].items():
        assert torch.allclose(found["weights"][name], value, rtol=0, atol=2e-6), name
    assert found["norm"] == pytest.approx(expected["norms"][-1], rel=1e-5) and max(expected["norms"]) > CLIP
    assert found["steps"] == (STEPS, STEPS * MICRO * ACCUMULATION * world, STEPS * ACCUMULATION, 0)
    assert (found["optimizer"], found["scheduler"]) == ("FusedAdamW", "NoneType")


def oracle(world: int) -> dict[str, Any]:
    return plain.train(STEPS, world=world, micro=MICRO, accumulation=ACCUMULATION, clip=CLIP, **OPTIONS)


def test_two_ranks_equal_plain_torch(ranks: Launcher, tmp_path: Path) -> None:
    expected = oracle(2)
    for rank, results in enumerate(ranks(2)(run_all, str(tmp_path))):
        for found in results:
            check(found, expected, rank, 2)


@pytest.mark.parametrize(("stage", "ours"), CASES)
def test_one_process_without_a_launcher_equals_plain_torch(stage: int, ours: bool, tmp_path: Path, alone: None) -> None:
    check(run(stage, str(tmp_path), ours), oracle(1), 0, 1)


def test_under_torchrun(tmp_path: Path) -> None:
    """In the environment of its processes, which is what the script and `initialize` see of it."""
    root = Path(__file__).resolve().parents[3]
    arguments = ["--deepspeed", "--deepspeed_config", write(str(tmp_path), 3, False), "--steps", "4"]
    env = plain_environment(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(root))
    words = ["-m", "tests.compat.scripts.old_script", *arguments]
    first, second = run_warm_ranks(*words, count=2, cwd=root, env=env)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    printed = re.search(r"result: \[(.*)\]", first.stdout + second.stdout)
    assert printed is not None, first.stdout + first.stderr
    assert [float(loss) for loss in printed[1].split(",")] == pytest.approx(oracle(2)["losses"][0][:4], abs=2e-6)


def interrupted(stage: int, folder: str, then: int) -> dict[str, Any]:
    """Half of the run, a checkpoint, the other half at another stage."""
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}}
    half = ["--steps", str(2 * ACCUMULATION)]
    config = ["--deepspeed_config", write(folder, stage, True, **warmup)]
    whole = old_script.main(zero_strategy.compat.deepspeed.scripts, [*config, "--steps", str(4 * ACCUMULATION)])
    first = old_script.main(zero_strategy.compat.deepspeed.scripts, [*config, *half, "--save", folder + "/saved"])
    config = ["--deepspeed_config", write(folder, then, True, **warmup)]
    second = old_script.main(zero_strategy.compat.deepspeed.scripts, [*config, *half, "--resume", folder + "/saved"])
    assert Path(folder, "saved", "latest").read_text().strip() == "global_step2"
    assert second["steps"] == whole["steps"] and whole["scheduler"] == "WarmupLR"
    return {
        "whole": whole["losses"],
        "parts": first["losses"] + second["losses"],
        "rates": (whole["rates"], first["rates"] + second["rates"]),
    }


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(interrupted, 2, str(tmp_path), 3):
        assert found["parts"] == pytest.approx(found["whole"], abs=1e-6)
        assert found["rates"][0] == found["rates"][1] and len(set(found["rates"][0])) > 2


def test_the_public_name_is_the_same_function() -> None:
    assert zero_strategy.initialize is zero_strategy.compat.deepspeed.scripts.initialize
