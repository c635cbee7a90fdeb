"""The config: its schema, its sources, and where each value comes from.

Example:
    ```python
    config = load_config("zero.yaml", stage=2)
    resolved = resolve(config, world_size=8, facts={"samples_per_step": batch_fact(8, 2, 4)})
    print(resolved.explain())
    ```
"""

from zero_strategy.config.deepspeed.owned import LATER_KEYS, check_owned, dtype_fact
from zero_strategy.config.deepspeed.read import inspect_deepspeed, is_deepspeed, read_deepspeed
from zero_strategy.config.deepspeed.settings import DeepSpeedSettings
from zero_strategy.config.load import ZeroSettings, load_config, load_layers, register_hydra
from zero_strategy.config.resolve import Fact, ResolvedConfig, batch_fact, check_no_sequence, resolve
from zero_strategy.config.schema import (
    DEFAULT_BUDGET,
    ActivationCheckpointingConfig,
    AutoConfig,
    CheckpointConfig,
    CommunicationConfig,
    DiagnosticsConfig,
    LossScaleConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    ReproducibleConfig,
    SurviveConfig,
    UnitsConfig,
    WatchdogConfig,
    ZeroConfig,
)
from zero_strategy.config.section import DEFAULT, Setting
from zero_strategy.config.sources import Layer, preset

__all__ = [
    "ActivationCheckpointingConfig",
    "AutoConfig",
    "CheckpointConfig",
    "CommunicationConfig",
    "DEFAULT",
    "DEFAULT_BUDGET",
    "DiagnosticsConfig",
    "DeepSpeedSettings",
    "Fact",
    "WatchdogConfig",
    "LATER_KEYS",
    "Layer",
    "LossScaleConfig",
    "MeshConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "ReproducibleConfig",
    "ResolvedConfig",
    "Setting",
    "SurviveConfig",
    "UnitsConfig",
    "ZeroConfig",
    "ZeroSettings",
    "batch_fact",
    "check_no_sequence",
    "check_owned",
    "dtype_fact",
    "inspect_deepspeed",
    "is_deepspeed",
    "load_config",
    "load_layers",
    "preset",
    "read_deepspeed",
    "register_hydra",
    "resolve",
]
