"""Training scripts in the manner of DeepSpeed: `initialize` gives an engine that is called, goes backward and steps."""

from __future__ import annotations

from zero_strategy.comm.process_group import init_distributed
from zero_strategy.compat.deepspeed.scripts.data import RepeatingLoader
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.compat.deepspeed.scripts.entry import add_config_arguments, initialize
from zero_strategy.compat.deepspeed.scripts.pipeline import ScriptPipelineEngine
from zero_strategy.compat.deepspeed.scripts.settings import BatchConfig, Config, FP16Config, TrainingConfig

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
