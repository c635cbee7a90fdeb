"""Sums of powers of this rank's parts of gradients, and how many of their values are not finite, part by part.

Parts lie in the memory of the host or of a GPU, or in a tier, from which they are read chunk by chunk. Sums are float64
(`ops.grad_stats`), or digits of exact ones (`ops.exact_sums`), for which parts are cut between blocks of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.offload.chunks import OffloadedPart, visit
from zero_strategy.ops.block_sums import WORDS
from zero_strategy.ops.library import FLOATS
from zero_strategy.optim.exact_sum import flag_bad_factors, times_power

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
        known = shard.powers
        if known is not None and known.norm_type == norm_type and not isinstance(known.total, Tensor):
            sums[index], nonfinite[index] = known.total, known.nonfinite
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


def exact_power_sums(shards: Sequence[Shard], norm_type: float, factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Digits of the sum of |x * factor| ** norm_type of every part, and how many x are not finite, on the CPU.

    A factor that is not finite makes its part so.
    """
    digits = torch.zeros(len(shards), WORDS, dtype=torch.int64)
    counts = torch.zeros(len(shards), dtype=torch.int64)
    finite = _finite(factors)
    here: dict[tuple[torch.device, bool], dict[int, Tensor]] = {}  # by device, and whether there may be kernels
    away = dict[int, OffloadedPart]()
    for index, shard in enumerate(shards):
        if isinstance(shard, Tensor):
            here.setdefault((shard.device, shard.dtype in FLOATS), {})[index] = shard
        elif not _take_known(shard, norm_type, finite[index], digits[index], counts[index]):
            away[index] = shard

    def add(indices: Sequence[int], values: Iterable[Tensor]) -> None:
        tensors = [value.detach().contiguous() for value in values]
        found = ops.exact_sums_on_host(tensors, norm_type, [finite[index] for index in indices])
        at = torch.tensor(indices)
        digits[at] += found[0]
        counts[at] += found[1]

    for parts in here.values():
        add(list(parts), parts.values())
    keys = list(away)
    visit(list(away.values()), lambda positions, values: add([keys[position] for position in positions], values))
    flag_bad_factors(digits, counts, factors)
    return digits, counts


def _take_known(part: OffloadedPart, norm_type: float, factor: float, digits: Tensor, count: Tensor) -> bool:
    """Take what the reduction has found on the way to the tier; False if the values have to be read."""
    known = part.powers
    if known is None or known.norm_type != norm_type or not isinstance(known.total, Tensor):
        return False
    # Numbers that are not finite stay so. Powers that are not may be with another factor.
    found = known.total if known.nonfinite else times_power(known.total, norm_type, factor)
    if found is not None:
        digits.copy_(found)
        count.fill_(known.nonfinite)
    return found is not None


def _finite(factors: Sequence[float]) -> list[float]:
    """The factors, 1 where one is not finite (`flag_bad_factors`)."""
    return [factor if math.isfinite(factor) else 1.0 for factor in factors]


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


def exact_power_sums_there(
    shards: Sequence[Tensor], norm_type: float, factors: Sequence[float], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Digits as `exact_power_sums` takes them, of tensors on a GPU, on which they stay: nobody waits.

    Returns:
        (shards, WORDS) int64; (shards,) int64: 1 where a sum is not finite, factors that are not left out.
    """
    if not shards:
        return torch.zeros(0, WORDS, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    values = [shard.detach().contiguous() for shard in shards]
    digits, flags = ops.exact_sums_and_flags(values, norm_type, _finite(factors))
    flag_bad_factors(digits, torch.zeros(len(shards), dtype=torch.int64), factors)
    return digits, flags


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
