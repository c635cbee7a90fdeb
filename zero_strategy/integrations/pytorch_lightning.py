"""ZeRO for the Trainer of `pytorch_lightning`; as `zero_strategy.integrations.lightning`."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from zero_strategy.integrations.lightning.callbacks import BatchEnd, NormLogging
from zero_strategy.integrations.lightning.namespaces import OfTheTrainerInUse
from zero_strategy.integrations.lightning.pipeline import TrainerPipeline
from zero_strategy.integrations.lightning.precision import TrainerPrecision
from zero_strategy.integrations.lightning.surviving import CopiesInMemory
from zero_strategy.integrations.lightning.trainer import TrainerStrategy


class ZeroPrecision(TrainerPrecision, Precision):
    """Precision plugin of `ZeroStrategy`; made from `Trainer(precision=...)`."""


class SaveOnSignal(BatchEnd, Callback):
    """Added to the Trainer's callbacks during a fit."""


class CopyInMemory(CopiesInMemory, Checkpoint):
    """Added to the Trainer's callbacks during a fit that survives deaths; a `Checkpoint`, as these come last."""


class ParameterNorms(NormLogging, Callback):
    """Trainer(callbacks=[ParameterNorms(every_n_steps=50)]): see `NormLogging`."""


class ZeroStrategy(TrainerStrategy, DDPStrategy, metaclass=OfTheTrainerInUse):
    """Shards optimizer state, gradients and parameters over the ranks.

    Stage 1 divides optimizer state, 2 gradients as well, 3 parameters as well. Settings are keywords, keys of a mapping
    or of a YAML file; `explain()` shows each with its origin. What is trained is what DDP trains.

    Example:
        ```python
        from pytorch_lightning import Trainer
        from zero_strategy import ZeroStrategy

        trainer = Trainer(devices=8, precision="bf16-true", strategy=ZeroStrategy(stage=3, offload="cpu"))
        trainer.fit(module, loader)
        ```
    """

    precision_class = ZeroPrecision
    batch_end_class = SaveOnSignal
    copies_class = CopyInMemory
    sigterm_exception = SIGTERMException


class PipelineStrategy(TrainerPipeline, ZeroStrategy):
    """Divides the layers of a LightningModule's `configure_pipeline()` among ranks; shards what copies share.

    Example:
        ```python
        from pytorch_lightning import Trainer
        from zero_strategy import PipelineStrategy

        trainer = Trainer(devices=4, strategy=PipelineStrategy(stages=2, micro_batches=8))  # two copies of two stages
        ```
    """
