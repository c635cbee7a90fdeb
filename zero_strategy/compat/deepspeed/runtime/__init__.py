"""`deepspeed.runtime`: its modules, each imported when it is asked for."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.on_demand import on_demand

_ROOMS = (
    "activation_checkpointing",
    "config",
    "config_utils",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "model_checkpointing",
    "pipe",
    "state_dict_factory",
    "swap_tensor",
    "utils",
    "zero",
)

__getattr__ = on_demand(__name__, _ROOMS)
