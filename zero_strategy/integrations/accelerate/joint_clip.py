"""One norm over the gradients of several engines, such as those of a text encoder and a denoiser in one loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.ops.library import norm_order
from zero_strategy.optim.grad_norm import GradientNorm

Parts = Sequence[tuple[ZeroEngine, Sequence[nn.Parameter]]]
"""Engines with those of their parameters that count, in an order that is the same on all ranks."""


def clip_together(parts: Parts, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most `max_norm`. A collective of every engine.

    Args:
        parts: The engines and parameters.
        max_norm: The bound.
        norm_type: Any positive p, or inf, also as the string "inf".

    Returns:
        The norm before clipping, 0-d float32.

    Raises:
        ValueError: If max_norm is negative.
    """
    if max_norm < 0:
        raise ValueError(f"max_norm must not be negative, not {max_norm}")
    norms = [engine.grad_norm(norm_type, parameters=parameters) for engine, parameters in parts]
    norm = joined(norms, norm_order(norm_type))
    for engine, parameters in parts:
        engine.scale_gradients(norm.coefficient(max_norm), parameters)
    return torch.tensor(norm.value, dtype=torch.float32)


def joined(norms: Sequence[GradientNorm], norm_type: float) -> GradientNorm:
    """The norm of several sets of gradients together: the norm of their norms.

    Powers are taken of multiples of the largest, so that none overflows.
    """
    values = [norm.value for norm in norms]
    finite = all(norm.finite for norm in norms)
    largest = math.nan if any(map(math.isnan, values)) else max(values)
    if math.isinf(norm_type) or not math.isfinite(largest) or largest == 0:
        return GradientNorm(largest, finite)
    return GradientNorm(largest * sum((value / largest) ** norm_type for value in values) ** (1 / norm_type), finite)
