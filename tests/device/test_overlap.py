"""Collectives hide behind what is computed: operations of the computing stream between a start and the wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from tests.activation.unit_nets import Transformer, seeded
from tests.device.recorder import Collective, Recorder
from tests.device.test_streams import CPU, device
from tests.device.test_streams import train as train_small
from tests.engine.nets import loss_of
from zero_strategy.comm.collectives import PendingWork
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp import param_bucket

UNITS, STEPS = 12, 3


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """As in a process without `torch.compile`: other tests may have used it in this one."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.counters.clear()


def train(recorder: Recorder, units: int = UNITS, **settings: Any) -> None:
    model = seeded(Transformer, units, 64)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", **settings))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    with recorder:
        for _ in range(STEPS):
            loss_of(model(torch.ones(4, 16, 64, device=CPU)).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(4, 16, 64, device=CPU))
    engine.close()


def recorded(world: int, **settings: Any) -> Recorder:
    with device(world) as recorder:
        train(recorder, **settings)
    assert not recorder.races and not recorder.syncs
    return recorder


def beside(collectives: list[Collective]) -> list[int]:
    found = [one.beside for one in collectives]
    assert len(found) >= STEPS * UNITS and None not in found, "somebody waits for each"
    return [count or 0 for count in found]


HYBRID = {"mesh": {"replicate": 2}}


@pytest.mark.parametrize(
    ("kinds", "world", "settings"),
    [
        (["all_reduce", "reduce_scatter"], 4, {"stage": 3, **HYBRID}),
        (["all_reduce", "all_gather"], 4, {"stage": 2, **HYBRID}),
        (["all_reduce"], 4, {"stage": 1, **HYBRID}),
        (["all_reduce"], 2, {"stage": 0}),
        (["all_gather"], 2, {"stage": 1}),
        (["all_gather"], 2, {"stage": 2}),
        (["reduce_scatter"], 2, {"stage": 3}),
    ],
    ids=str,
)
def test_what_is_computed_hides_collectives(kinds: list[str], world: int, settings: dict[str, Any]) -> None:
    """HSDP's sum over replicas, stage 0's, and the gather after a step, as the shard group's sum."""
    recorder = recorded(world, **settings)
    for kind in kinds:
        counts = beside([one for one in recorder.collectives if one.what == kind])
        assert median(counts) >= 20, (kind, counts)
        assert min(counts) > 0, (kind, counts)


def replicas_that_do_not_wait_for_the_shards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingWork, "follow", lambda self: lambda: None)


def parameters_used_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(param_bucket._Arrival, "wait", lambda self: None)


@pytest.mark.parametrize(
    ("plant", "settings"),
    [
        (replicas_that_do_not_wait_for_the_shards, {"stage": 3, **HYBRID}),
        (replicas_that_do_not_wait_for_the_shards, {"stage": 0, **HYBRID}),
        (parameters_used_before_they_are_there, {"stage": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_overlap_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with device(4) as recorder:
        train(recorder, units=2, **settings)
    assert recorder.races


def read_on_another_stream(recorder: Recorder) -> None:
    """A step, a read of all parameters by another stream, and a forward on the one of the step."""
    model = seeded(Transformer, 2, 64)
    engine = ZeroEngine(model, load_config(units={"min_numel": 0}, watchdog="off", stage=2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    with recorder:
        loss_of(model(torch.ones(4, 16, 64, device=CPU)).float()).backward()
        optimizer.step()
        other = recorder.new()
        kept = []
        with recorder.within(other):
            kept += [parameter * 1 for parameter in model.parameters()]
        recorder.computing.wait_stream(other)
        with torch.no_grad():
            model(torch.ones(4, 16, 64, device=CPU))
    engine.close()


def test_the_stream_of_the_step_waits_whoever_reads_first() -> None:
    with device() as recorder:
        read_on_another_stream(recorder)
    assert not recorder.races


@pytest.mark.parametrize("settings", [{"stage": 0}, {"stage": 0, **HYBRID}, {"stage": 1, **HYBRID}], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_chained_collectives_wait_as_they_have_to(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    with device(4) as recorder:
        train_small(recorder, micro=2, dtype=dtype, **settings)
    assert not recorder.races and not recorder.syncs


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_undivided_state_wait_for_the_gradients(stage: int) -> None:
    """Two replicas of one shard each: no sum of a shard group comes before, for which the side stream would wait."""
    with device(2) as recorder:
        train_small(recorder, micro=2, stage=stage, mesh={"replicate": 2})
    assert not recorder.races and not recorder.syncs
