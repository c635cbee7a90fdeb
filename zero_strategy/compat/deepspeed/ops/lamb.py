"""`deepspeed.ops.lamb`: Lamb with DeepSpeed's arguments, taken by the fused optimizer of this package."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from zero_strategy import optim

__all__ = ["FusedLamb"]


class FusedLamb(optim.FusedLamb):
    """As `deepspeed.ops.lamb.FusedLamb`, but for the trust ratio, which is not bounded; a warning says so.

    Args:
        params: Parameters or param groups.
        lr: Learning rate.
        bias_correction: True.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        eps_inside_sqrt: False.
        weight_decay: Factor of the decay.
        max_grad_norm: 0; the engine clips.
        max_coeff: Accepted.
        min_coeff: Accepted.
        amsgrad: False.

    Raises:
        ValueError: If an option asks for what is not done; names it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise ValueError(f"max_grad_norm={max_grad_norm} is not done here; set gradient_clipping in the config")
        asked = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad}
        for name, value in asked.items():
            if bool(value) != (name == "bias_correction"):
                raise ValueError(f"{name}={value} is not done here; leave it out")
        warnings.warn(
            f"FusedLamb: the trust ratio is not bounded here (DeepSpeed: {min_coeff} to {max_coeff})", stacklevel=2
        )
        super().__init__(params, lr, betas, eps, weight_decay)
