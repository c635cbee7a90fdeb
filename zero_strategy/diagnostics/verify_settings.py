"""How `verify` trains, for both sides; and in what order the sharded side adds up, as documented."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from zero_strategy.config import ResolvedConfig

DEFAULT_TOLERANCE = 8.0
"""Where bits cannot be reproduced: this many times what re-ordered summation explains."""


@dataclass(frozen=True)
class VerifySettings:
    """The training that is compared.

    Attributes:
        steps: Optimizer steps.
        accumulation: Micro-batches per step and rank.
        clip_norm: Bound of the gradient norm, or None.
        compute_dtype: What parameters are computed with, None for their own; bf16 and fp16 have fp32 master weights,
            and fp16 the loss scale of the config.
        autocast: Dtype of autocast, or None; likewise.
        seed: Of the factory; rank r draws from seed + r afterwards.
        tolerance: How many times what re-ordered summation explains may differ. 0: bits must be equal. None: bits
            where the order of summation can be reproduced, else 8.
        device: Where to compute.

    Raises:
        ValueError: If a number makes no sense; names it.
    """

    steps: int = 5
    accumulation: int = 1
    clip_norm: float | None = None
    compute_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    tolerance: float | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for name in ("steps", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in ("clip_norm", "tolerance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}; accepted: 0 or more")

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled, and steps skipped that overflow."""
        return torch.float16 in (self.compute_dtype, self.autocast)

    def batches(self, ranks: int) -> int:
        """How many batches a run takes."""
        return self.steps * self.accumulation * ranks

    def number(self, step: int, micro: int, rank: int, ranks: int) -> int:
        """Which batch it is."""
        return (step * self.accumulation + micro) * ranks + rank

    def forward_context(self) -> AbstractContextManager[object]:
        """What forwards run in."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def unreproducible(config: ResolvedConfig, settings: VerifySettings) -> str:
    """Why one process cannot repeat the order of summation, or "" where it can."""
    if settings.device.type != "cpu":
        return "sums on a GPU are in the order of its library"
    if config.config.precision.reduce_dtype != "float32" and config.world_size > 1:
        return f"gradients are summed over ranks in {config.config.precision.reduce_dtype}"
    scale = config.config.loss_scale
    factors = scale.initial, scale.growth_factor, scale.backoff_factor, scale.minimum
    if settings.scales_loss and any(math.frexp(factor)[0] != 0.5 for factor in factors):
        return "the loss scale is no power of two"
    return ""
