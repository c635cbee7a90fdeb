"""Collectives and steps against cases computed by hand, the tables of the design, and what must be monotonic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale.collectives import Group, Link
from benchmarks.scale.hardware import PRESETS, Machine
from benchmarks.scale.layouts import LAYOUTS, gpt, layout_of
from benchmarks.scale.steps import Compute, Layout, Prediction, Workload, compute_of, predict, state_bytes

NEAR = Link(latency=1.0, bandwidth=100.0)
FAR = Link(latency=5.0, bandwidth=10.0)
MACHINE = Machine("hand", 1e3, 1.0, 1e6, 1e3, 1.0, 8, NEAR, FAR, overlap=0.0, asynchronous=False)
WORKLOAD = Workload("hand", parameters=400, units=4, layers=3, hidden=2, sequence=8, tokens=16, parameter_bytes=4)
COMPUTE = Compute(forward=8.0, backward=16.0, optimizer=1.0)
CONTROL = 6 + 0.75 * 64 * 2 / 100
"""An all-reduce of 64 bytes on four ranks of a host."""
H100 = PRESETS["h100-sxm"]


def test_ring_and_tree_on_one_host() -> None:
    group = Group(4, 1, Link(1.0, 10.0), FAR, start=0.5, add=0.1)
    assert group.all_gather(80) == pytest.approx(0.5 + 3 + 60 / 10)
    assert group.reduce_scatter(80) == pytest.approx(0.5 + 3 + 60 / 10 + 60 * 0.1)
    assert group.ring_all_reduce(80) == pytest.approx(0.5 + 6 + 120 / 10 + 60 * 0.1)
    assert group.tree_all_reduce(80) == pytest.approx(0.5 + 2 * 3 + 160 / 10 + 80 * 0.1)
    assert group.all_reduce(80) == group.ring_all_reduce(80)


def test_between_hosts_a_ring_has_all_their_ports() -> None:
    group = Group(8, 2, Link(1.0, 10.0), Link(5.0, 1.0))
    assert group.bandwidth == 4.0
    assert group.all_gather(80) == pytest.approx(6 * 1 + 1 * 5 + 70 / 4)
    assert group.ring_all_reduce(80) == pytest.approx(2 * 11 + 140 / 4)
    assert group.tree_all_reduce(80) == pytest.approx(2 * (3 + 5) + 160 / 4)
    assert group.all_reduce(80) == pytest.approx(56) and group.all_reduce(8000) == group.ring_all_reduce(8000)
    assert group.message(7) == pytest.approx(5 + 7)


def test_which_ranks_share_a_host() -> None:
    assert MACHINE.group(8).hosts == 1 and MACHINE.group(32).hosts == 4
    column = MACHINE.group(4, stride=8)
    assert column.hosts == 4 and column.bandwidth == 10.0, "a rank of each host has its own port only"
    pairs = MACHINE.group(4, stride=4)
    assert pairs.hosts == 2 and pairs.bandwidth == 20.0
    with pytest.raises(ValueError, match="2 ranks on 3 hosts"):
        Group(2, 3, NEAR, FAR)


def step(
    stage: int,
    ranks: int = 4,
    shard: int | None = None,
    micro_batches: int = 1,
    kept: bool = False,
    **machine: float,
) -> Prediction:
    layout = Layout("", stage, ranks, shard or ranks, kept=kept)
    return predict(replace(WORKLOAD, micro_batches=micro_batches), layout, replace(MACHINE, **machine), COMPUTE)


def test_one_after_the_other() -> None:
    # A unit has 400 bytes: gathered or reduced in 3 + 3 s, all-reduced in 6 + 6 s. There are 4 of them.
    base = 8 + 16 + 1 + 2 * CONTROL
    assert step(0).step == pytest.approx(base + 4 * 12)
    assert step(1).step == pytest.approx(base + 4 * 6 + 4 * 6)
    assert step(2).step == pytest.approx(base + 4 * 6 + 4 * 6)
    assert step(3).step == pytest.approx(base + 4 * 6 + 4 * 12)
    assert step(3).communication == step(3).exposed == pytest.approx(72 + 2 * CONTROL)


def test_both_at_once() -> None:
    base = 1 + 2 * CONTROL
    assert step(0, overlap=1).step == pytest.approx(8 + (12 + 4 + 3 * 12) + base)
    assert step(1, overlap=1).step == pytest.approx(8 + (6 + 4 + 3 * 6) + 4 * 6 + base)
    assert step(3, overlap=1).step == pytest.approx((6 + 2 + 3 * 6) + (12 + 4 + 3 * 12) + base)
    half = step(3, overlap=0.5)
    assert half.step == pytest.approx((step(3).step + step(3, overlap=1).step) / 2)


def test_micro_batches_send_what_their_stage_says() -> None:
    # A unit's backward takes 2 s in each of two micro-batches.
    assert step(2, micro_batches=2, overlap=1).step == pytest.approx(8 + 2 * (6 + 2 + 18) + 24 + 1 + 3 * CONTROL)
    assert step(1, micro_batches=2, overlap=1).step == pytest.approx(8 + 8 + (6 + 2 + 18) + 24 + 1 + 3 * CONTROL)


def test_kept_parameters_are_gathered_once_beside_the_forward() -> None:
    base = 1 + 2 * CONTROL
    assert step(3, kept=True).step == pytest.approx(8 + 4 * 6 + 16 + 4 * 6 + base)
    assert step(3, kept=True, overlap=1).step == pytest.approx((6 + 2 + 18) + (6 + 4 + 18) + base)
    twice = step(3, kept=True, micro_batches=2, overlap=1)
    assert twice.step == pytest.approx((6 + 1 + 18) + 4 + 2 * (6 + 2 + 18) + 1 + 3 * CONTROL)
    assert twice.communication == pytest.approx(step(2, micro_batches=2).communication)
    assert twice.state_bytes == step(2, micro_batches=2).state_bytes
    with pytest.raises(ValueError, match="kept at stage 2"):
        Layout("", 2, 4, 4, kept=True)


def test_copies_of_rows() -> None:
    # Rows of two: gathered in 1 + 2 s; reduced in 3 s, then 200 bytes all-reduced between two rows in 2 + 2 s.
    found = step(3, shard=2)
    assert found.communication == pytest.approx(4 * 3 + 4 * (3 + 3 + 4) + 2 * CONTROL)
    assert found.layout.replicate == 2


def test_the_host_costs_what_the_device_does_not_hide() -> None:
    assert step(3, unit_overhead=0.5, step_overhead=2).overhead == pytest.approx(0.5 * 2 * 4 + 2)
    behind = step(3, overlap=1, unit_overhead=10, asynchronous=True)
    # Forward: the first unit's 6 + 2 and the others' 6 become 10 each; backward's 16 and 12 are longer anyway.
    assert behind.overhead == pytest.approx(2 + 3 * 4)
    assert step(3, overlap=1, unit_overhead=5, asynchronous=True).overhead == 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_are_those_of_the_design(accumulation: int) -> None:
    free = replace(MACHINE, within=Link(0.0, 100.0))
    workload = replace(WORKLOAD, micro_batches=accumulation)
    for stage, elements in {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}.items():
        found = predict(workload, Layout("", stage, 4, 4), free, COMPUTE)
        control = (accumulation + 1) * 2 * 0.75 * 64
        assert found.communication * 100 - control == pytest.approx(elements * 400 * 4 * 0.75)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_sends_nothing(stage: int) -> None:
    found = step(stage, ranks=1)
    assert found.communication == found.exposed == found.bubble == 0
    assert found.step == pytest.approx(8 + 16 + 1)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 16), (8, 8)])
def test_bubble_is_that_of_the_closed_form(stages: int, count: int) -> None:
    free = replace(MACHINE, within=Link(0.0, 1e30), between=Link(0.0, 1e30))
    found = predict(WORKLOAD, Layout("", 1, stages, 1, stages, "1f1b", count), free, COMPUTE)
    assert found.bubble / (found.bubble + found.compute) == pytest.approx((stages - 1) / (count + stages - 1))
    assert found.exposed == pytest.approx(0, abs=1e-20)
    zero = predict(WORKLOAD, Layout("", 1, stages, 1, stages, "zb_h1", count), free, COMPUTE)
    assert zero.bubble < found.bubble


def test_a_pipeline_in_lanes() -> None:
    # Two stages of two ranks, units of 400 bytes, two a stage: reduced in 1 + 2 s, gathered in as many.
    found = predict(WORKLOAD, Layout("", 1, 4, 2, 2, "1f1b", 4), MACHINE, COMPUTE)
    message = 1 + 16 * 2 / 4 * 2 * 4 / 100
    assert found.exposed == pytest.approx(2 * 3 + 2 * 3 + 2 * CONTROL)
    assert found.bubble == pytest.approx(2 + 4 + 4 * message), "drawn by hand"
    assert found.step == pytest.approx(24 + 1 + found.exposed + found.bubble)


def test_state_is_that_of_the_design() -> None:
    sliced = 4 + 12 / 4, 2 + 16 / 4
    waiting = 8 + 8 / 4, 6 + 12 / 4
    rows = ((0, 1, 16, 18), (1, 2, *waiting), (1, 1, *sliced), (2, 1, *sliced), (2, 2, *sliced), (3, 2, 4, 18 / 4))
    for stage, micro_batches, single, low in rows:
        workload = replace(WORKLOAD, micro_batches=micro_batches)
        assert state_bytes(workload, Layout("", stage, 4, 4)) == pytest.approx(400 * single)
        assert state_bytes(replace(workload, parameter_bytes=2), Layout("", stage, 4, 4)) == pytest.approx(400 * low)


def test_computation_by_peaks() -> None:
    layout = Layout("", 1, 4, 4)
    flops = 16 * (6 * 400 + 12 * 3 * 2 * 8)
    found = compute_of(WORKLOAD, layout, MACHINE)
    assert found.forward + found.backward == pytest.approx(flops / 1e3) and found.backward == 2 * found.forward
    assert found.optimizer == pytest.approx(100 * 28 / 1e3)
    again = compute_of(replace(WORKLOAD, recompute=True, parameter_bytes=2), layout, MACHINE)
    assert again.backward == 3 * again.forward and again.optimizer == pytest.approx(100 * 30 / 1e3)


MODEL = gpt("gpt-7b", 32, 4096, sequence=4096, tokens=4096)


def named(name: str, ranks: int, machine: Machine = H100) -> Prediction:
    layout = layout_of(name, ranks, MODEL, machine)
    assert layout is not None
    return predict(MODEL, layout, machine)


@pytest.mark.parametrize("name", LAYOUTS)
def test_more_ranks_and_slower_links_are_never_quicker(name: str) -> None:
    sizes = [2**power for power in range(4, 13)]
    exposed = [named(name, ranks).exposed for ranks in sizes]
    assert exposed == sorted(exposed), "with as many tokens for each"
    for change in (
        {"between": Link(H100.between.latency, H100.between.bandwidth / 4)},
        {"within": Link(2 * H100.within.latency, H100.within.bandwidth)},
        {"between": Link(10 * H100.between.latency, H100.between.bandwidth)},
        {"overlap": 0.2}, {"unit_overhead": 0.05}, {"step_overhead": 0.1}, {"compute_efficiency": 0.3},
    ):  # fmt: skip
        assert named(name, 256, replace(H100, **change)).step >= named(name, 256).step
    assert all(0 < named(name, ranks).utilization < H100.compute_efficiency for ranks in sizes)


def test_hybrid_sharding_scales_further_than_one_row() -> None:
    assert named("hybrid", 4096).step < named("zero3", 4096).step
    assert named("hybrid", 4096).layout.shard == 8


def test_layouts_have_room_for_the_state() -> None:
    large = gpt("gpt-70b", 80, 8192, sequence=4096, tokens=4096)
    hybrid, pipeline = (layout_of(name, 256, large, H100) for name in ("hybrid", "pipeline"))
    assert hybrid is not None and pipeline is not None
    assert hybrid.shard == 32 and state_bytes(large, hybrid) <= 0.8 * H100.memory_bytes
    assert state_bytes(large, pipeline) <= 0.8 * H100.memory_bytes
    assert layout_of("hybrid", 8, large, H100) is None and layout_of("pipeline", 4, large, H100) is None
    with pytest.raises(ValueError, match="layout 'zero9'"):
        layout_of("zero9", 8, large, H100)
    for wrong, message in (
        ({"ranks": 10, "shard": 4}, "10 ranks are not copies"),
        ({"stages": 2, "shard": 4}, "reduces per micro-batch"),
        ({"stage": 4}, "stage 4"),
    ):
        with pytest.raises(ValueError, match=message):
            Layout(**{"name": "", "stage": 3, "ranks": 8, "shard": 8, **wrong})
