"""`deepspeed.ops.transformer`: the transformer layer, by DeepSpeed's names."""

from zero_strategy.transformer import TransformerConfig as DeepSpeedTransformerConfig
from zero_strategy.transformer import TransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
