"""A watchdog keeps no tensor of a collective that was waited for."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.launcher import Launcher
from tests.watchdog.test_dropping import eventually
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.transport import DeviceCollectives
from zero_strategy.config import WatchdogConfig

NUMEL = 1 << 16
"""Enough to go through shared memory."""


def _on_a_device(mesh: Mesh, kind: Literal["all_gather", "reduce_scatter"], flat: Tensor) -> Any:
    """As collectives of GPUs: torch's own work, which holds its tensors."""
    device = DeviceCollectives(mesh.gather.group)
    job = device.all_gather(flat) if kind == "all_gather" else device.reduce_scatter(flat, None, 1.0)
    return mesh.gather._start(kind, "layers.0", flat, device, job)


def _held() -> list[str]:
    """Operations that are still held, by kind of collective."""
    mesh = Mesh.build(replicate=1, shard=2, timeout=60.0, barrier_seconds=10.0, name="held", watchdog=WatchdogConfig())
    found = []
    for kind in ("all_gather", "reduce_scatter"):
        for native in (False, True):
            flat = torch.ones(NUMEL)
            storage = StorageWeakRef(flat.untyped_storage())
            work = _on_a_device(mesh, kind, flat) if native else getattr(mesh.gather, kind)(flat, of="layers.0")
            work.wait()
            del flat
            if not eventually(storage.expired):  # gloo's own thread is in no hurry
                found.append(f"{kind}, native {native}")
    assert mesh.gather.track is not None
    if not all(one.work is None for one in mesh.gather.track._works):
        found.append("works")
    mesh.close()
    return found


def test_nothing_is_held_of_what_is_over(ranks: Launcher) -> None:
    assert ranks(2)(_held) == [[], []]
