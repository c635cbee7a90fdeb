"""`deepspeed.sequence`: not here but for what asks nothing of experts or sequences, see `names.py`."""

from __future__ import annotations

from typing import Any

from zero_strategy.compat.deepspeed.names import named
from zero_strategy.compat.deepspeed.on_demand import on_demand

_ROOMS = ("layer",)

_room, _name = on_demand(__name__, _ROOMS), named(__name__)


def __getattr__(name: str) -> Any:
    return _room(name) if name in _ROOMS else _name(name)
