"""`deepspeed.runtime.config`."""

from zero_strategy.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig

__all__ = ["BatchConfig", "Config", "FP16Config", "TrainingConfig"]
