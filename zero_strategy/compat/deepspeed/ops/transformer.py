"""`deepspeed.ops.transformer`: the transformer layer, by DeepSpeed's names."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig as DeepSpeedTransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
