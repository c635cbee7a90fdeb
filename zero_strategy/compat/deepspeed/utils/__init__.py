"""`deepspeed.utils`: whole and local parameters, gradients and optimizer states; the repeating loader; the logger."""

from __future__ import annotations

from typing import Any

from zero_strategy.compat.deepspeed.names import named
from zero_strategy.compat.deepspeed.on_demand import on_demand
from zero_strategy.compat.deepspeed.scripts.data import RepeatingLoader
from zero_strategy.compat.deepspeed.utils.z3_leaf_module import z3_leaf_module
from zero_strategy.optim.full_state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

__all__ = [
    "RepeatingLoader",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "z3_leaf_module",  # a module's name as well, which this one shall hide
]

_ROOMS = ("groups", "init_on_device", "logging", "nvtx", "tensor_fragment", "timer", "zero_to_fp32")

_room, _name = on_demand(__name__, _ROOMS), named(__name__)


def __getattr__(name: str) -> Any:
    return _room(name) if name in _ROOMS else _name(name)
