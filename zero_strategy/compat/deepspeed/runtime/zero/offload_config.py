"""`deepspeed.runtime.zero.offload_config`: places and kinds of state."""

from __future__ import annotations

from enum import Enum

from zero_strategy.compat.deepspeed.names import named


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state that `engine.offload_states(include=...)` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


__getattr__ = named(__name__)
