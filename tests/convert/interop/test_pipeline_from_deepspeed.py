"""A pipeline that the real DeepSpeed trained and saved on two ranks is read in every bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.convert.interop.deepspeed_ranks import run
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.convert.deepspeed import read
from zero_strategy.convert.portable import portable_of, write_portable

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_stages_with_a_tied_embedding(tmp_path: Path, dtype: str) -> None:
    worker = "tests.convert.interop.deepspeed_workers:save_pipeline"
    stages = run(worker, 2, {"dtype": dtype, "path": str(tmp_path)})
    state = read(tmp_path)
    kinds = dict(state.optimizers[0].kinds)
    assert ("master" in kinds) == (dtype == "bfloat16")
    names = {name for live in stages for name in live["fp32"]}
    buffers = {name for name in state.weights if name.endswith("scale")}
    assert state.weights.keys() - buffers == names and "tied_modules.embed.weight" in names
    assert buffers == {"1.scale", "3.scale"} and state.weights["1.scale"].load().tolist() == [1.5]
    assert state.aliases == {"0.weight": "tied_modules.embed.weight"}
    for live in stages:
        for name, expected in live["module"].items():
            assert torch.equal(state.weights[name].load(), expected), name
        for name in live["fp32"]:
            if "master" in kinds:
                assert torch.equal(kinds["master"][name].load(), live["fp32"][name])
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(kinds[kind][name].load(), live[kind][name])
            assert state.optimizers[0].scalars[name] == {"step": 3.0}
    groups = state.optimizers[0].param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.1), (0.02, 0.0)]
    assert {name for group in groups for name in group["params"]} == names
    assert state.client_state["note"] == "pipe" and state.counters["global_steps"] == 3
    write_portable(state, tmp_path / "ours")
    again = portable_of(CheckpointReader(tmp_path / "ours"))
    assert again.weights.keys() == state.weights.keys()
    assert not read(tmp_path, optimizer=False).optimizers
