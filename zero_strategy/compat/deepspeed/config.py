"""`deepspeed.config`: the config objects of DeepSpeed 0.3."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig

__all__ = ["BatchConfig", "Config", "FP16Config", "TrainingConfig"]
