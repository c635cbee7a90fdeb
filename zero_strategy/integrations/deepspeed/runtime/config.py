"""`deepspeed.runtime.config`."""

from zero_strategy.integrations.deepspeed.names import named
from zero_strategy.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig

__all__ = ["BatchConfig", "Config", "FP16Config", "TrainingConfig"]

__getattr__ = named(__name__)
