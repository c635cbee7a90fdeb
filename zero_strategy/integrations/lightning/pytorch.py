"""ZeRO for the Trainer of `lightning.pytorch`.

import zero_strategy
Trainer(strategy="zero3")                                            # or "zero1", "zero2", "zero3_spawn", ...
Trainer(strategy=zero_strategy.ZeroStrategy(stage=3, prefetch=2))
"""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zero_strategy.integrations.lightning.callbacks import BatchEnd, NormLogging
from zero_strategy.integrations.lightning.namespaces import OfTheTrainerInUse
from zero_strategy.integrations.lightning.pipeline import TrainerPipeline
from zero_strategy.integrations.lightning.precision import TrainerPrecision
from zero_strategy.integrations.lightning.surviving import CopiesInMemory
from zero_strategy.integrations.lightning.trainer import TrainerStrategy

_PUBLIC = "zero_strategy.integrations.lightning"
"""Where users import these classes from: the path in their files, pickles and command lines."""

__all__ = ["ParameterNorms", "PipelineStrategy", "ZeroPrecision", "ZeroStrategy"]


class ZeroPrecision(TrainerPrecision, Precision):
    """Precision plugin of `ZeroStrategy`; made from `Trainer(precision=...)`."""

    __module__ = _PUBLIC


class SaveOnSignal(BatchEnd, Callback):
    """Added to the Trainer's callbacks during a fit."""

    __module__ = _PUBLIC


class CopyInMemory(CopiesInMemory, Checkpoint):
    """Added to the Trainer's callbacks during a fit that survives deaths; a `Checkpoint`, as these come last."""

    __module__ = _PUBLIC


class ParameterNorms(NormLogging, Callback):
    """Trainer(callbacks=[ParameterNorms(every_n_steps=50)]): see `NormLogging`."""

    __module__ = _PUBLIC


class ZeroStrategy(TrainerStrategy, DDPStrategy, metaclass=OfTheTrainerInUse):
    """Shards optimizer state, gradients and parameters over the ranks.

    Stage 1 divides optimizer state, 2 gradients as well, 3 parameters as well. Settings are keywords, keys of a mapping
    or of a YAML file; `explain()` shows each with its origin. What is trained is what DDP trains.

    Example:
        ```python
        from lightning.pytorch import Trainer
        from zero_strategy import ZeroStrategy

        trainer = Trainer(devices=8, precision="bf16-true", strategy=ZeroStrategy(stage=3, offload="cpu"))
        trainer.fit(module, loader)
        ```
    """

    __module__ = _PUBLIC

    precision_class = ZeroPrecision
    batch_end_class = SaveOnSignal
    copies_class = CopyInMemory
    sigterm_exception = SIGTERMException


class PipelineStrategy(TrainerPipeline, ZeroStrategy):
    """Divides the layers of a LightningModule's `configure_pipeline()` among ranks; shards what copies share.

    Example:
        ```python
        from lightning.pytorch import Trainer
        from zero_strategy import PipelineStrategy

        trainer = Trainer(devices=4, strategy=PipelineStrategy(stages=2, micro_batches=8))  # two copies of two stages
        ```
    """

    __module__ = _PUBLIC
