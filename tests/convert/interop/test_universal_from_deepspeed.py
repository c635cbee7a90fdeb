"""Checkpoints from DeepSpeed's own converter are read in every bit, in both of its layouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.interop.deepspeed_ranks import run
from tests.convert.interop.deepspeed_workers import GROUPS
from zero_strategy.compat.deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from zero_strategy.convert.universal import detect, read

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
CASES = [(1, "float32", 2), (2, "bfloat16", 2), (3, "bfloat16", 2), (3, "float32", 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("saved")
    worker = "tests.convert.interop.deepspeed_workers:save_and_convert"
    return path, run(worker, 2, {"path": str(path), "cases": CASES})[0]


def check(path: Path, live: dict[str, dict[str, torch.Tensor]], case: tuple[int, str, int]) -> None:
    assert detect(path) == (path.name == "universal")  # a root has a `latest`, too
    state = read(path)
    (optimizer,) = state.optimizers
    assert state.weights.keys() - {"scale"} == live["fp32"].keys() and state.weights["scale"].load().item() == 1.5
    assert state.aliases == {"out.weight": "embed.weight"}
    for name, expected in live["fp32"].items():
        assert torch.equal(state.weights[name].load(), expected.to(getattr(torch, case[1]))), name
        if case[1] != "float32":
            assert torch.equal(optimizer.kinds["master"][name].load(), expected)
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.kinds[kind][name].load(), live[kind][name])
        assert optimizer.scalars[name] == {"step": 3.0}
    assert [{key: group[key] for key in GROUPS[0]} for group in optimizer.param_groups] == list(GROUPS[: case[2]])
    assert {name for group in optimizer.param_groups for name in group["params"]} == live["fp32"].keys()
    assert state.counters["global_steps"] == 3 and state.client_state["note"] == "theirs"


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_their_converter_s_output(saved: tuple[Path, list[dict[str, Any]]], number: int) -> None:
    path, results = saved
    check(path / str(number), results[number]["live"], CASES[number])


def test_parameters_that_their_converter_mixes_up_are_noticed_and_ours_does_not(tmp_path: Path) -> None:
    case = (2, "bfloat16", 1)
    zero = {"stage": 2, "round_robin_gradients": True}
    argument = {"path": str(tmp_path), "cases": [case], "config": {"zero_optimization": zero}}
    live = run("tests.convert.interop.deepspeed_workers:save_and_convert", 2, argument)[0][0]["live"]
    theirs = read(tmp_path / "0" / "step3_universal")
    with pytest.raises(ValueError, match=r"has other values in .* round_robin_gradients"):
        for name in live["fp32"]:
            theirs.weights[name].load()
    folders = ["--input_folder", f"{tmp_path}/0/step3", "--output_folder", f"{tmp_path}/universal"]
    main(parse_arguments(folders))
    ours = read(tmp_path / "universal")
    module = torch.load(tmp_path / "0/step3/mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name in live["fp32"]:
        assert torch.equal(ours.weights[name].load(), module[name])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_our_converter_on_the_same_checkpoint(saved: Any, tmp_path: Path, number: int) -> None:
    path, results = saved
    source, target = path / str(number) / "step3", tmp_path / "universal"
    main(parse_arguments(["--input_folder", str(source), "--output_folder", str(target)]))
    check(target, results[number]["live"], CASES[number])
