"""`deepspeed.ops.adagrad`: Adagrad with DeepSpeed's arguments, taken by the fused optimizer of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_strategy import optim

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(optim.FusedAdagrad):
    """Adagrad wherever the parameters are; as `deepspeed.ops.adagrad.DeepSpeedCPUAdagrad`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        eps: Added to the root of the sum.
        weight_decay: Factor of the decay.
        amsgrad: False.
        fp32_optimizer_states: True.

    Raises:
        ValueError: If `amsgrad` or `fp32_optimizer_states` asks for what is not done.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad=True is not done here; leave it out")
        if not fp32_optimizer_states:
            raise ValueError("fp32_optimizer_states=False is not done here: sums of squares are kept in float32")
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)
