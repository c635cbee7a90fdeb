"""Processes are counted by the launcher's environment: flags that say otherwise are one sentence on all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment

from tests.integrations.lightning.trainers import Module, join, loader, raises, trainer, zero
from tests.launcher import Launcher
from zero_strategy.integrations import fabric as fabrics


class Launched(LightningEnvironment):
    """The ranks of the pool, as somebody's own launcher tells them; `size` may be told otherwise."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self._size = dist.get_world_size() if size is None else size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher knows."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher knows."""

    def local_rank(self) -> int:
        return dist.get_rank()


def flags(devices: int, size: int | None = None) -> Any:
    return trainer(zero(3), devices=devices, plugins=[Launched(size)])


def counts() -> int:
    # Rank 1 has no device of its own here, and must say the same.
    for devices in (1, 3):
        told = f"Trainer(devices={devices}, num_nodes=1) means {devices} process(es), but Launched has 2; set devices"
        with raises(ValueError, told):
            flags(devices).fit(Module(), loader())
    with raises(ValueError, "Launched has 4 and the process group 2; make the process group of all"):
        flags(4, size=4).fit(Module(), loader())
    with raises(ValueError, "means 2 process(es), but Launched has 4 and the process group 2; set devices"):
        flags(2, size=4).fit(Module(), loader())
    join()
    with raises(ValueError, "Fabric(devices=1, num_nodes=1) means 1 process(es), but Launched has 2; set devices"):
        Fabric(accelerator="cpu", devices=1, strategy=fabrics.ZeroStrategy(stage=3), plugins=[Launched()]).launch()
    run = flags(2)
    run.fit(Module(), loader())
    return int(run.world_size)


def test_flags_that_are_not_what_was_launched(ranks: Launcher) -> None:
    assert ranks(2)(counts) == [2, 2]
