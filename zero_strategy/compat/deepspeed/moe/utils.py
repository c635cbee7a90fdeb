"""`deepspeed.moe.utils`: param groups of models without experts in parallel, which is what there is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): no module divides experts among ranks."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """False, likewise."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups as a list: there are no parameters of experts to be put into groups of their own.

    Args:
        param_groups: One, or several.
        max_group_size: Of groups of experts; without effect.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
