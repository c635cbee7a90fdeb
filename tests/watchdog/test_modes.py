"""A strict watchdog names a mistake at once; a watchdog that is off does nothing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.launcher import Launcher
from tests.watchdog.faults import PATIENCE, Told
from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import WatchdogConfig, load_config


def _strict(seconds: float) -> Told:
    """Collectives of one group, of which rank 1 begins another one, of as many bytes."""
    watchdog = WatchdogConfig(mode="strict", wait_seconds=seconds, silence_seconds=seconds)
    mesh = Mesh.build(replicate=1, shard=2, timeout=60.0, barrier_seconds=10.0, name="strict", watchdog=watchdog)
    flat, started = torch.ones(8), time.monotonic()
    mesh.gather.all_gather(flat, of="layers.0").wait()
    mesh.control.all_gather_small(flat, "the norm")
    try:
        mesh.gather.all_gather(flat, of=f"layers.{1 + dist.get_rank()}").wait()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic() - started)
    return Told("nothing", "", 0.0)


def test_a_strict_guard_compares_before(ranks: Launcher) -> None:
    for told in ranks(2)(_strict, 30.0):
        assert told.kind == "DesyncError" and told.seconds < PATIENCE, told
        for rank in range(2):
            assert f"rank {rank} begins all_gather of `layers.{1 + rank}` (32 bytes, float32)" in told.text, told


def _off() -> list[Any]:
    mesh = Mesh.build(
        replicate=1,
        shard=2,
        timeout=60.0,
        barrier_seconds=10.0,
        name="off",
        watchdog=load_config(watchdog="off").watchdog,
    )
    return [mesh.watchdog, mesh.gather.track, mesh.barrier.track]


def test_a_guard_that_is_off(ranks: Launcher) -> None:
    assert ranks(2)(_off) == [[None] * 3] * 2
