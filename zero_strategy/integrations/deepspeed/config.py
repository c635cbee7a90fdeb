"""`deepspeed.config`: the config objects of DeepSpeed 0.3."""

from zero_strategy.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig

__all__ = ["BatchConfig", "Config", "FP16Config", "TrainingConfig"]
