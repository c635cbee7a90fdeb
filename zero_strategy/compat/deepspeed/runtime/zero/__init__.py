"""`deepspeed.runtime.zero`; its modules are imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zero_strategy.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

_ROOMS = ("config", "offload_config", "partition_parameters", "stage_1_and_2", "stage3")

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
