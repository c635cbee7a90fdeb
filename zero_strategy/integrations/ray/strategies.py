"""Strategies of the Trainer for Ray's workers.

Ray's `prepare_trainer` takes subclasses of its own strategies alone. From its subclass of `DDPStrategy` these have the
device that Ray gave to the worker; ranks come from the plugin `RayLightningEnvironment`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import ray.train
from ray.train.lightning import RayDDPStrategy

from zero_strategy.integrations.lightning.namespaces import strategy_class
from zero_strategy.integrations.lightning.pipeline import TrainerPipeline
from zero_strategy.watchdog.diagnosis import DesyncError

if TYPE_CHECKING:
    from zero_strategy.integrations.lightning.pytorch import ZeroStrategy

_LOST_SECONDS = 1.0
"""How long a process may take to be gone once its connections are."""

_PUBLIC = "zero_strategy.integrations.ray"
"""Where users import these classes from."""


def lightning_in_use() -> str:
    """The namespace of Lightning that Ray's classes are of."""
    of_the_package = any(base.__module__.startswith("pytorch_lightning.") for base in RayDDPStrategy.__mro__)
    return "pytorch_lightning" if of_the_package else "lightning.pytorch"


if not TYPE_CHECKING:
    ZeroStrategy = strategy_class(lightning_in_use())


class RayZeroStrategy(ZeroStrategy, RayDDPStrategy):
    """`ZeroStrategy` in the workers of Ray Train, with the same settings.

    The process group is Ray's, whose `TorchConfig` has its backend and its timeout.

    Example:
        ```python
        trainer = Trainer(
            strategy=RayZeroStrategy(stage=3),
            devices="auto",
            accelerator="auto",
            plugins=[RayLightningEnvironment()],
            callbacks=[RayReportCallback()],
        )
        trainer = ray.train.lightning.prepare_trainer(trainer)
        trainer.fit(module, loader, ckpt_path=reported_checkpoint())
        ```
    """

    __module__ = _PUBLIC

    @property
    def num_processes(self) -> int:
        """Workers per host of `num_nodes`, as Ray counts them: `devices` cannot tell hosts with different numbers."""
        if self.parallel_devices is None:  # no Trainer has taken the strategy, which may be outside of a worker
            return 0
        workers: int = ray.train.get_context().get_world_size()
        return workers // self.num_nodes

    def on_exception(self, exception: BaseException) -> None:
        """See `ZeroStrategy`; names the workers that are gone in Ray's logs, and in the error that Ray shows."""
        super().on_exception(exception)
        # Errors of this package's collectives name them; those of Lightning's own tell a broken connection only.
        if isinstance(exception, RuntimeError) and not isinstance(exception, DesyncError):
            if lost := self._lost_workers():
                logging.getLogger(_PUBLIC).error(lost)
                if hasattr(exception, "add_note"):  # from Python 3.11 on
                    exception.add_note(lost)

    def _lost_workers(self) -> str:
        watchdog = None if self.engine is None else self.engine.mesh.watchdog
        if watchdog is None:
            return ""
        end, lost = time.monotonic() + _LOST_SECONDS, list[str]()
        while not lost and time.monotonic() < end:
            time.sleep(0.05)
            others = (rank for rank in range(self.world_size) if rank != self.global_rank)
            lost = [f"rank {rank} is gone: {why}" for rank in others if (why := watchdog.lost(rank))]
        return "; ".join(lost)


class RayPipelineStrategy(TrainerPipeline, RayZeroStrategy):
    """`PipelineStrategy` in the workers of Ray Train; see `RayZeroStrategy`."""

    __module__ = _PUBLIC
