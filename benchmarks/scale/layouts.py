"""Ways in which a number of ranks may share a model: the layouts that are compared, and models by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.scale.hardware import Machine
from benchmarks.scale.steps import Layout, Workload, state_bytes

LAYOUTS = ("zero1", "zero2", "zero3", "zero3-kept", "hybrid", "pipeline")
ROOM = 0.8
"""The part of the device's memory that model state may take; activations need the rest."""

MODELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "gpt-1.3b": (24, 2048),
        "gpt-7b": (32, 4096),
        "gpt-13b": (40, 5120),
        "gpt-70b": (80, 8192),
        "gpt-175b": (96, 12288),
    }
)
"""Layers and width."""
VOCABULARY = 50304


def gpt(
    name: str, layers: int, hidden: int, *, sequence: int, tokens: int, micro_batches: int = 1, recompute: bool = False
) -> Workload:
    """A GPT in bf16: 12 layers hidden^2 parameters and an embedding; each layer is a unit, and the embedding is one."""
    parameters = 12 * layers * hidden**2 + VOCABULARY * hidden
    return Workload(
        name, parameters, layers + 1, layers, hidden, sequence, tokens, micro_batches, recompute=recompute
    )  # fmt: skip


def layout_of(
    name: str,
    ranks: int,
    workload: Workload,
    machine: Machine,
    *,
    shard: int | None = None,
    stages: int | None = None,
    schedule: str = "1f1b",
    micro_batches: int = 0,
) -> Layout | None:
    """A layout of so many ranks; None where there is none, or it is that of another name.

    Args:
        name: One of LAYOUTS.
        ranks: How many.
        workload: What is trained.
        machine: On what.
        shard: Of "hybrid", ranks of a row; None: those of a host, doubled until the state has room.
        stages: Of "pipeline"; None: two, doubled until the state of stage 1 has room.
        schedule: Of "pipeline".
        micro_batches: Of "pipeline", for each step; 0: four for each stage.

    Raises:
        ValueError: If there is no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r}: there are {', '.join(LAYOUTS)}")
    if name == "hybrid":
        return _hybrid(ranks, workload, machine, shard)
    if name == "pipeline":
        return _pipeline(ranks, workload, machine, stages, schedule, micro_batches)
    return Layout(name, int(name[4]), ranks, ranks, kept=name.endswith("-kept"))


def _hybrid(ranks: int, workload: Workload, machine: Machine, shard: int | None) -> Layout | None:
    row = shard or machine.ranks_per_host
    while row < ranks:
        if ranks % row == 0:
            layout = Layout(f"hybrid {ranks // row} x {row}", 3, ranks, row)
            if shard is not None or state_bytes(workload, layout) <= ROOM * machine.memory_bytes:
                return layout
        if shard is not None:
            return None
        row *= 2
    return None  # one row of all ranks is zero3


def _pipeline(
    ranks: int, workload: Workload, machine: Machine, stages: int | None, schedule: str, micro_batches: int
) -> Layout | None:
    depth = stages or 2
    while depth <= min(ranks, workload.layers):
        if ranks % depth == 0:
            dp_group = ranks // depth
            layout = Layout(f"pipeline {depth} x {dp_group}", 1, ranks, dp_group, depth, schedule, micro_batches)
            if stages is not None or state_bytes(workload, layout) <= ROOM * machine.memory_bytes:
                return layout
        if stages is not None:
            return None
        depth *= 2
    return None
