"""DeepSpeed's estimators give its kinds of answers, from our plan: by formula, and never below what is held."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

import zero_strategy.compat.deepspeed as deepspeed
from zero_strategy.compat.deepspeed.runtime.zero import stage3, stage_1_and_2
from zero_strategy.config import load_config

COUNT = 64_000_000
LAYER = 2_000_000


def near(value: float, expected: float) -> bool:
    return abs(value - expected) <= 0.01 * expected


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (4, 2)])
def test_zero2_by_formula(gpus: int, nodes: int) -> None:
    world, unit = gpus * nodes, COUNT / 32
    host, device = stage_1_and_2.estimate_zero2_model_states_mem_needs(COUNT, gpus, nodes, cpu_offload=False)
    in_flight = 3 * 4 * unit + 2 * unit
    assert near(device, 2 * COUNT + 16 * COUNT / world + in_flight)
    assert host == 4 * COUNT * gpus, "each rank builds the model"
    host, device = stage_1_and_2.estimate_zero2_model_states_mem_needs(COUNT, gpus, nodes, cpu_offload=True)
    assert near(host, max(16 / world, 4) * COUNT * gpus)  # gradients leave the device with the optimizer's state
    assert near(device, 2 * COUNT + in_flight + 4 * unit / world)  # a slice of gradients on its way to the host


def test_zero3_by_formula() -> None:
    host, device, largest = stage3.estimate_zero3_model_states_mem_needs(
        COUNT, LAYER, num_gpus_per_node=4, cpu_offload=False
    )
    assert largest == 4 * LAYER
    assert near(device, 18 * COUNT / 4 + 2 * 2 * LAYER + 3 * 4 * LAYER + 2 * LAYER)
    assert near(host, 4 * LAYER * 4)
    host, device, _ = stage3.estimate_zero3_model_states_mem_needs(COUNT, LAYER, num_gpus_per_node=4, zero_init=False)
    assert near(host, 18 * COUNT), "state of all four ranks; that each of them builds the model takes 16"
    host, _, _ = stage3.estimate_zero3_model_states_mem_needs(
        COUNT, LAYER, num_gpus_per_node=8, zero_init=False, additional_buffer_factor=1.0
    )
    assert near(host, 8 * 4 * COUNT), "each of eight ranks builds the model"
    host, device, _ = stage3.estimate_zero3_model_states_mem_needs(COUNT, LAYER, num_gpus_per_node=4, zero_init=False)
    doubled = stage3.estimate_zero3_model_states_mem_needs(
        COUNT, LAYER, num_gpus_per_node=4, zero_init=False, additional_buffer_factor=2.0
    )
    assert doubled == (2 * host, device, 4 * LAYER)


def test_signatures_are_deepspeed_s() -> None:
    def names(function: object) -> list[str]:
        assert callable(function)
        return list(inspect.signature(function).parameters)

    hosts, factor = ["num_gpus_per_node", "num_nodes"], ["additional_buffer_factor"]
    assert names(stage_1_and_2.estimate_zero2_model_states_mem_needs) == [
        "total_params", *hosts, "cpu_offload", *factor
    ]  # fmt: skip
    assert names(stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live) == ["model", *hosts, *factor]
    assert names(stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold) == ["total_params", *hosts, *factor]
    sizes = ["total_params", "largest_layer_params"]
    assert names(stage3.estimate_zero3_model_states_mem_needs) == [
        *sizes, *hosts, "cpu_offload", "cpu_offload_params", "zero_init", *factor
    ]  # fmt: skip
    assert names(stage3.estimate_zero3_model_states_mem_needs_all_live) == ["model", *hosts, *factor]
    assert names(stage3.estimate_zero3_model_states_mem_needs_all_cold) == [*sizes, *hosts, *factor]


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, 4, 2)
    live = capsys.readouterr().out
    assert "8M parameters" in live and "2 node(s) of 4 GPU(s)" in live
    assert [line.split("| ")[-1] for line in live.splitlines()[3:]] == [
        "offload_optimizer=cpu", "offload_optimizer=none"
    ]  # fmt: skip
    held = load_config(stage=2).plan(model, world_size=8, compute_dtype=torch.bfloat16, device="cuda", snapshots=False)
    states = replace(held, communicator_bytes=0)  # what these functions estimate
    assert f"{states.ledger().tier_bytes('device') / 2**30:.2f}GB" in live
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(COUNT)
    stage3.estimate_zero3_model_states_mem_needs_all_cold(COUNT, LAYER)
    assert "2M in its largest unit" in capsys.readouterr().out
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=4)
    lines = capsys.readouterr().out.splitlines()[3:]
    assert len(lines) == 6 and lines[0].endswith("offload_param=cpu, offload_optimizer=cpu, zero_init=1")


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="largest_layer_params 7"):
        stage3.estimate_zero3_model_states_mem_needs(5, 7)
