"""Sums of powers of this rank's parts of gradients, and how many of their values are not finite, part by part.

Parts lie in the memory of the host or of a GPU, or in a tier, from which they are read chunk by chunk. Sums are float64
(`ops.grad_stats`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.offload.chunks import OffloadedPart, visit
from zero_strategy.ops.library import FLOATS

Shard = Tensor | OffloadedPart
"""A rank's part of a gradient: in memory, or in a tier, from which it is read a few elements at a time."""


def power_sums(shards: Sequence[Shard], norm_type: float) -> tuple[Tensor, Tensor]:
    """Sum of |x| ** norm_type (inf: largest |x|) of every part, and how many x are not finite, on the CPU."""
    sums, nonfinite = torch.zeros(len(shards), dtype=torch.float64), torch.zeros(len(shards), dtype=torch.int64)
    here = {index: shard for index, shard in enumerate(shards) if isinstance(shard, Tensor)}
    away = dict[int, OffloadedPart]()
    for index, shard in enumerate(shards):
        if not isinstance(shard, OffloadedPart):
            continue
        # The reduction has summed these on the way to the tier: nothing need be read again.
        if shard.powers is not None and shard.powers[0] == norm_type:
            sums[index] = shard.powers[1]
            nonfinite[index] = shard.powers[2]
        else:
            away[index] = shard
    is_max = math.isinf(norm_type)

    def add(indices: Sequence[int], values: Sequence[Tensor]) -> None:
        found, counts = _of_tensors(values, norm_type)
        at = torch.tensor(indices)
        sums[at] = torch.maximum(sums[at], found) if is_max else sums[at] + found
        nonfinite[at] += counts

    if here:
        add(list(here), list(here.values()))
    keys = list(away)
    visit(list(away.values()), lambda positions, values: add([keys[position] for position in positions], values))
    return sums, nonfinite


def _of_tensors(shards: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    sums, nonfinite = torch.zeros(len(shards), dtype=torch.float64), torch.zeros(len(shards), dtype=torch.int64)
    by_device: dict[torch.device, list[int]] = {}
    others: dict[torch.device, list[int]] = {}  # that the op does not take
    for index, shard in enumerate(shards):
        if _is_taken(shard):
            by_device.setdefault(shard.device, []).append(index)
        # Torch refuses the maximum of nothing, and nothing adds nothing.
        elif shard.numel():
            others.setdefault(shard.device, []).append(index)
    for indices in others.values():
        found = _by_torch([shards[index] for index in indices], norm_type)
        sums[indices], nonfinite[indices] = ops.stats_to_host(*found)
    for indices in by_device.values():
        sums[indices], nonfinite[indices] = ops.stats_on_host([shards[index].detach() for index in indices], norm_type)
    return sums, nonfinite


def power_sums_there(shards: Sequence[Tensor], norm_type: float, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """Sums and counts as `power_sums` takes them, of tensors on a GPU, on which they stay: nobody waits.

    Args:
        shards: The parts, all of them there.
        norm_type: p.
        device: The GPU, for a rank that has no part.

    Returns:
        (shards,) float64 sums; (shards,) int64 counts of values that are not finite; False if a count is only 0 or 1,
        for a sum that is not finite.
    """
    sums = torch.zeros(len(shards), dtype=torch.float64, device=device)
    counts = torch.zeros(len(shards), dtype=torch.int64, device=device)
    taken = [index for index, shard in enumerate(shards) if _is_taken(shard)]
    others = [index for index, shard in enumerate(shards) if not _is_taken(shard) and shard.numel()]
    exact = True
    if taken:
        found = ops.sums_and_flags([shards[index].detach() for index in taken], norm_type)
        exact = found[2]
        if len(taken) == len(shards):
            return found
        _put(sums, found[0], taken)
        _put(counts, found[1], taken)
    if others:
        of_others = _by_torch([shards[index] for index in others], norm_type)
        _put(sums, of_others[0], others)
        _put(counts, of_others[1], others)
    return sums, counts, exact


def exact_counts(shards: Sequence[Tensor], unsure: Sequence[int], like: Tensor) -> Tensor:
    """Count the values of each that are not finite, for those at `unsure`; 0 for the others; on their GPU."""
    counts = torch.zeros_like(like)
    for index in unsure:
        counts[index].copy_((~torch.isfinite(shards[index].detach())).sum())
    return counts


def _put(into: Tensor, values: Tensor, indices: Sequence[int]) -> None:
    """Write results to their places, part by part: an index on the device would have to be copied there."""
    for index, value in zip(indices, values.unbind(), strict=True):
        into[index].copy_(value)


def _is_taken(shard: Tensor) -> bool:
    """True if the op takes it."""
    return shard.dtype in FLOATS and shard.is_contiguous()


def _by_torch(shards: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
    """Sums and counts on the tensors' device, none of which is empty."""
    values = [shard.detach() for shard in shards]
    norms = torch.stack([torch.linalg.vector_norm(value, norm_type, dtype=torch.float64) for value in values])
    norms = norms if math.isinf(norm_type) else norms**norm_type
    return norms, torch.stack([(~torch.isfinite(value)).sum() for value in values])
