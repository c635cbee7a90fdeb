"""Strategies of the Trainer for Ray's workers.

Ray's `prepare_trainer` takes subclasses of its own strategies alone. From its subclass of `DDPStrategy` these have the
device that Ray gave to the worker; ranks come from the plugin `RayLightningEnvironment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray.train
from ray.train.lightning import RayDDPStrategy

from zero_strategy.integrations.lightning.namespaces import strategy_class
from zero_strategy.integrations.lightning.pipeline import TrainerPipeline

if TYPE_CHECKING:
    from zero_strategy.integrations.lightning.pytorch import ZeroStrategy

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


class RayPipelineStrategy(TrainerPipeline, RayZeroStrategy):
    """`PipelineStrategy` in the workers of Ray Train; see `RayZeroStrategy`."""

    __module__ = _PUBLIC
