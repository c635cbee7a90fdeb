"""Training scripts in the manner of DeepSpeed: `initialize` gives an engine that is called, goes backward and steps."""

from zero_strategy.distributed.start import init_distributed
from zero_strategy.scripts.arguments import add_config_arguments
from zero_strategy.scripts.config_objects import BatchConfig, Config, FP16Config, TrainingConfig
from zero_strategy.scripts.data import RepeatingLoader
from zero_strategy.scripts.engine import ScriptEngine
from zero_strategy.scripts.entry import initialize
from zero_strategy.scripts.pipeline import ScriptPipelineEngine

__all__ = [
    "BatchConfig",
    "Config",
    "FP16Config",
    "RepeatingLoader",
    "ScriptEngine",
    "ScriptPipelineEngine",
    "TrainingConfig",
    "add_config_arguments",
    "init_distributed",
    "initialize",
]
