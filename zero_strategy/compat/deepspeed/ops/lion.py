"""`deepspeed.ops.lion`: Lion with DeepSpeed's arguments, taken by the fused optimizer of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_strategy import optim

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(optim.FusedLion):
    """As `deepspeed.ops.lion.FusedLion`.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        betas: Factors of the update and of the moment.
        weight_decay: Factor of the decay.
        set_grad_none: Accepted; `zero_grad` has torch's argument for it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(optim.FusedLion):
    """Lion wherever the parameters are; as `deepspeed.ops.lion.DeepSpeedCPULion`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        betas: Factors of the update and of the moment.
        weight_decay: Factor of the decay.
        fp32_optimizer_states: Keep the moment in float32; False: in bfloat16.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, betas, weight_decay, moment_dtype="float32" if fp32_optimizer_states else "bfloat16"
        )
