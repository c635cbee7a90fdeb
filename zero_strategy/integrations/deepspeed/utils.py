"""`deepspeed.utils`: whole fp32 parameters, gradients and optimizer states; the repeating loader."""

from zero_strategy.optim.full_state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from zero_strategy.scripts.data import RepeatingLoader

__all__ = [
    "RepeatingLoader",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]
