"""ZeRO for scripts written for transformers: its Trainer, its models, and callbacks."""

from zero_strategy.integrations.huggingface.pretrained import from_pretrained, pipeline_layers, pipeline_loss
from zero_strategy.integrations.huggingface.sequence_models import divide_sequences, tiles_of
from zero_strategy.integrations.huggingface.tensor_models import divide_layers
from zero_strategy.integrations.huggingface.trainer import (
    WeightAveragingCallback,
    ZeroTrainer,
    ZeroTrainerMixin,
    make_zero_trainer,
)

__all__ = [
    "WeightAveragingCallback",
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "divide_layers",
    "divide_sequences",
    "from_pretrained",
    "make_zero_trainer",
    "pipeline_layers",
    "pipeline_loss",
    "tiles_of",
]
