"""Which parameters of a unit share a bucket, and in what dtypes: pure rules, for the engine and for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from zero_strategy.config import PrecisionConfig

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""What master weights are kept for."""


class _Grouped(Protocol):
    """What a parameter is grouped by."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def requires_grad(self) -> bool: ...


P = TypeVar("P", bound=_Grouped)


def group_parameters(
    parameters: Iterable[tuple[str, P]],
    compute_dtype: torch.dtype | None,
    device: torch.device | None = None,
    *,
    everything: bool = False,
) -> list[tuple[torch.dtype, Sequence[tuple[str, P]]]]:
    """Divide the parameters of one unit into buckets.

    Args:
        parameters: (name, parameter), in registration order.
        compute_dtype: Dtype that floating-point parameters take, or None to keep theirs.
        device: Where those on the meta device become real.
        everything: All are moved there.

    Returns:
        By bucket, in the order of first parameters: the dtype that its parameters take, and its parameters.
    """
    keys: dict[tuple[torch.dtype, torch.dtype, torch.device, bool], list[tuple[str, P]]] = {}
    for name, parameter in parameters:
        target = parameter.dtype
        if compute_dtype is not None and parameter.dtype.is_floating_point:
            target = compute_dtype
        moves = device is not None and (everything or parameter.device.type == "meta")
        place = device if device is not None and moves else parameter.device
        key = (target, parameter.dtype, place, parameter.requires_grad)
        keys.setdefault(key, []).append((name, parameter))
    return [(dtype, named) for (dtype, *_), named in keys.items()]


def gradient_dtypes(dtype: torch.dtype, precision: PrecisionConfig) -> tuple[torch.dtype, torch.dtype]:
    """In what the gradients of parameters of `dtype` are accumulated, and in what they are summed over ranks."""
    wide = torch.float32 if dtype in LOW_PRECISION else dtype
    accumulated = wide if precision.gradient_dtype == "float32" else dtype
    return accumulated, wide if precision.reduce_dtype == "float32" else accumulated


def wants_master(dtype: torch.dtype, precision: PrecisionConfig) -> bool:
    """Whether trainable parameters of `dtype` have an fp32 copy for the optimizer."""
    return precision.master_weights and dtype in LOW_PRECISION
