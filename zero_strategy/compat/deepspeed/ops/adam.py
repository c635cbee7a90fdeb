"""`deepspeed.ops.adam`: Adam with DeepSpeed's arguments, taken by the fused optimizers of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_strategy import optim

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(optim.FusedAdam):
    """Adam, or AdamW with `adam_w_mode`; as `deepspeed.ops.adam.FusedAdam`.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: True.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Decay the weights apart from the gradient.
        weight_decay: Factor of the decay.
        amsgrad: False.
        set_grad_none: Accepted; `zero_grad` has torch's argument for it.

    Raises:
        ValueError: If `bias_correction` or `amsgrad` asks for what is not done.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(bias_correction, amsgrad)
        self._decoupled = adam_w_mode
        super().__init__(params, lr, betas, eps, weight_decay)


class DeepSpeedCPUAdam(optim.FusedAdam):
    """Adam, or AdamW with `adamw_mode`, wherever the parameters are; as `deepspeed.ops.adam.DeepSpeedCPUAdam`.

    Args:
        model_params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: True.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the decay.
        amsgrad: False.
        adamw_mode: Decay the weights apart from the gradient.
        fp32_optimizer_states: Keep moments in float32; False: in bfloat16.

    Raises:
        ValueError: If `bias_correction` or `amsgrad` asks for what is not done.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(bias_correction, amsgrad)
        self._decoupled = adamw_mode
        moments = "float32" if fp32_optimizer_states else "bfloat16"
        super().__init__(model_params, lr, betas, eps, weight_decay, moment_dtype=moments)


def _check(bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction:
        raise ValueError("bias_correction=False is not done here; leave it out")
    if amsgrad:
        raise ValueError("amsgrad=True is not done here; use torch.optim.Adam(amsgrad=True)")
