"""Norms of sharded gradients: one figure for every stage, and the clip that follows from it.

Squares are summed in float64 (`ops.grad_stats`), so that the norm does not depend on how the elements are divided (up
to the last bit of a float64, which the float32 coefficient does not see). Non-finite values are a flag of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.distributed import Communicator
from zero_strategy.memory.vectors import OffloadedPart, visit
from zero_strategy.ops.arguments import FLOATS, norm_order

Shard = Tensor | OffloadedPart
"""A rank's part of a gradient: in memory, or in a tier, from which it is read a few elements at a time."""


@dataclass(frozen=True)
class GradientNorm:
    """The norm of a set of gradients over all ranks.

    Attributes:
        value: The norm (inf or nan if a gradient is).
        finite: Whether every element of every gradient on every rank is finite.
    """

    value: float
    finite: bool

    def coefficient(self, max_norm: float) -> float:
        """What gradients are multiplied by so that their norm is at most `max_norm`; 1.0 below it.

        The formula is `torch.nn.utils.clip_grad_norm_`'s: max_norm / (norm + 1e-6), at most 1.
        """
        return min(1.0, max_norm / (self.value + 1e-6)) if not math.isnan(self.value) else math.nan


@dataclass(frozen=True)
class GradientStats:
    """What the pass over the gradients that a norm takes found on this rank, part by part.

    Attributes:
        names: The parameter of each part.
        norm_type: p.
        sums: Of |x| ** p (inf: the largest |x|) over each part, float64.
        nonfinite: How many x of each part are not finite.
        norm: Of all ranks together.
    """

    names: list[str]
    norm_type: float
    sums: Tensor
    nonfinite: Tensor
    norm: GradientNorm


def global_norm(
    shards: Iterable[Shard],
    norm_type: float | str,
    groups: Iterable[Communicator],
    scales: Sequence[float] | None = None,
    look: Callable[[Tensor, Tensor], None] | None = None,
) -> GradientNorm:
    """The norm of all ranks' `shards` together.

    Args:
        shards: This rank's parts, flat; every element of a gradient lies on exactly one rank of `groups`.
        scales: What each part is to be multiplied by first; default: 1.
        norm_type: Any positive p, or inf, also as the string "inf".
        groups: Communicators over which the parts are spread (the shard axis, and model-parallel groups).
        look: Takes the sums of this rank's parts, and how many values of each are not finite.

    Raises:
        ValueError: If `norm_type` is not positive.
    """
    norm_type = norm_order(norm_type)
    shards, groups = list(shards), list(groups)
    factors = [1.0] * len(shards) if scales is None else scales
    if math.isinf(norm_type):
        largest, finite = _totals(shards, norm_type, groups, factors, look)
        return GradientNorm(largest, finite)
    total, finite = _totals(shards, norm_type, groups, factors, look)
    if not finite:
        return GradientNorm(total, False)
    if math.isfinite(total):
        return GradientNorm(total ** (1.0 / norm_type), True)
    # finite numbers whose powers are not: as multiples of the largest
    largest, _ = _totals(shards, math.inf, groups, factors)
    parts = [
        (shard if isinstance(shard, Tensor) else shard.read()).detach().double() * (factor / largest)
        for shard, factor in zip(shards, factors, strict=True)
    ]
    total, _ = _totals(parts, norm_type, groups, [1.0] * len(parts))
    return GradientNorm(largest * total ** (1.0 / norm_type), True)


def _totals(
    shards: Sequence[Shard],
    norm_type: float,
    groups: Sequence[Communicator],
    factors: Sequence[float],
    look: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[float, bool]:
    """Sum of |x| ** norm_type (inf: the largest |x|) over all ranks, and whether every x is finite."""
    is_max = math.isinf(norm_type)
    sums, counts = _all_power_sums(shards, norm_type)
    scales = torch.tensor(factors, dtype=torch.float64).abs()
    counts = counts + ~torch.isfinite(scales)
    sums = sums * (scales if is_max else scales**norm_type)
    if look is not None:
        look(sums, counts)
    total = sums.max() if is_max and len(sums) else sums.sum()
    found = torch.stack([total, counts.sum().double()])
    for group in groups:
        values = torch.stack(group.exchange_small(found, "the gradient norm"))
        summed = values.sum(dim=0)
        found = torch.stack([values[:, 0].amax(), summed[1]]) if is_max else summed
    return float(found[0]), float(found[1]) == 0


def _all_power_sums(shards: Sequence[Shard], norm_type: float) -> tuple[Tensor, Tensor]:
    """`_power_sums` of tensors and of what is in tiers."""
    sums, nonfinite = torch.zeros(len(shards), dtype=torch.float64), torch.zeros(len(shards), dtype=torch.int64)
    here = {index: shard for index, shard in enumerate(shards) if isinstance(shard, Tensor)}
    away = dict[int, OffloadedPart]()
    for index, shard in enumerate(shards):
        if not isinstance(shard, OffloadedPart):
            continue
        if shard.powers is not None and shard.powers[0] == norm_type:
            sums[index] = shard.powers[1]
            nonfinite[index] = shard.powers[2]
        else:
            away[index] = shard
    is_max = math.isinf(norm_type)

    def add(indices: Sequence[int], values: Sequence[Tensor]) -> None:
        found, counts = _power_sums(values, norm_type)
        at = torch.tensor(indices)
        sums[at] = torch.maximum(sums[at], found) if is_max else sums[at] + found
        nonfinite[at] += counts

    if here:
        add(list(here), list(here.values()))
    keys = list(away)
    visit(list(away.values()), lambda positions, values: add([keys[position] for position in positions], values))
    return sums, nonfinite


def _power_sums(shards: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Sum of |x| ** norm_type (inf: largest |x|) of every tensor, and how many x are not finite, on the CPU."""
    sums, nonfinite = torch.zeros(len(shards), dtype=torch.float64), torch.zeros(len(shards), dtype=torch.int64)
    by_device: dict[torch.device, list[int]] = {}
    others: dict[torch.device, list[int]] = {}  # that the op does not take
    for index, shard in enumerate(shards):
        if shard.dtype in FLOATS and shard.is_contiguous():
            by_device.setdefault(shard.device, []).append(index)
        elif shard.numel():
            others.setdefault(shard.device, []).append(index)
    for indices in others.values():
        values = [shards[index].detach() for index in indices]
        norms = torch.stack([torch.linalg.vector_norm(value, norm_type, dtype=torch.float64) for value in values])
        sums[indices] = (norms if math.isinf(norm_type) else norms**norm_type).cpu()
        nonfinite[indices] = torch.stack([(~torch.isfinite(value)).sum() for value in values]).cpu()
    for indices in by_device.values():
        found, counts = ops.grad_stats([shards[index].detach() for index in indices], norm_type)
        sums[indices] = found.cpu()
        nonfinite[indices] = counts.cpu().to(torch.int64)
    return sums, nonfinite
