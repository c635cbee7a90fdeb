"""`deepspeed.runtime`: its modules, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_ROOMS = ("config", "dataloader", "engine", "lr_schedules", "zero")


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
