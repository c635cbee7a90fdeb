"""ZeRO for the Trainer of `pytorch_lightning`; as `zero_strategy.integrations.lightning`."""

from __future__ import annotations

from pytorch_lightning import Callback
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from zero_strategy.integrations.namespaces import OfTheTrainerInUse
from zero_strategy.integrations.norm_logging import NormLogging
from zero_strategy.integrations.trainer import TrainerStrategy
from zero_strategy.integrations.trainer_pipeline import TrainerPipeline
from zero_strategy.integrations.trainer_precision import TrainerPrecision
from zero_strategy.integrations.trainer_preemption import BatchEnd


class ZeroPrecision(TrainerPrecision, Precision):
    """Precision plugin of `ZeroStrategy`; made from `Trainer(precision=...)`."""


class SaveOnSignal(BatchEnd, Callback):
    """Added to the Trainer's callbacks during a fit."""


class ParameterNorms(NormLogging, Callback):
    """Trainer(callbacks=[ParameterNorms(every_n_steps=50)]): see `NormLogging`."""


class ZeroStrategy(TrainerStrategy, DDPStrategy, metaclass=OfTheTrainerInUse):
    """Shards optimizer state, gradients and parameters over the ranks."""

    precision_class = ZeroPrecision
    batch_end_class = SaveOnSignal
    sigterm_exception = SIGTERMException


class PipelineStrategy(TrainerPipeline, ZeroStrategy):
    """Divides the layers of a LightningModule's `configure_pipeline()` among ranks; shards what copies share."""
