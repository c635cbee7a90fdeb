"""`deepspeed.runtime.config`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.names import named
from zero_strategy.compat.deepspeed.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig

__all__ = ["BatchConfig", "Config", "FP16Config", "TrainingConfig"]

__getattr__ = named(__name__)
