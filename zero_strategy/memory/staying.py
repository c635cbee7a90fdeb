"""Which chunks of parameters and gradients stay in host memory (`offload.resident_bytes`), computed from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from zero_strategy.config import ResolvedConfig
from zero_strategy.memory.allowance import Allowance
from zero_strategy.memory.bucket_facts import BucketFacts, Units, placement_of
from zero_strategy.memory.cuts import Cuts
from zero_strategy.memory.offload import Offload


@dataclass(frozen=True)
class Staying:
    """Of one bucket.

    Attributes:
        weights: How many of the first chunks of its slice stay.
        gradients: How many of those of its reduced gradients, after the head.
    """

    weights: int = 0
    gradients: int = 0


def staying(units: Units, resolved: ResolvedConfig, offload: Offload) -> dict[int, Staying]:
    """What stays of every bucket, by its id: of parameters first, unit by unit, then of gradients."""
    return _given(units, resolved, offload)[0]


def staying_bytes(units: Units, resolved: ResolvedConfig, offload: Offload) -> int:
    """Bytes of what stays: the least `offload.resident_bytes` by which it does."""
    return offload.resident_bytes - _given(units, resolved, offload)[1]


def _given(units: Units, resolved: ResolvedConfig, offload: Offload) -> tuple[dict[int, Staying], int]:
    """What stays, and the bytes that are left."""
    buckets = [bucket for unit in units for bucket in unit]
    allowance = Allowance(offload.resident_bytes)
    weights, gradients = dict[int, int](), dict[int, int]()
    if offload.parameters == "nvme":
        for bucket in buckets:
            weights[id(bucket)] = allowance.take(_weights_costs(bucket, offload))
    if offload.gradient_tier(resolved.gradient_reduction) == "nvme":
        for bucket in (bucket for bucket in buckets if bucket.trainable):
            start, stop = bucket.owned(placement_of(resolved), 0)
            cuts = offload.cuts(stop - start)
            sizes = [(high - low) * bucket.gradient_dtype.itemsize for low, high in cuts.chunks]
            gradients[id(bucket)] = allowance.take(sizes[cuts.heads :])
    found = {id(each): Staying(weights.get(id(each), 0), gradients.get(id(each), 0)) for each in buckets}
    return found, allowance.left


def stop_of(cuts: Cuts, count: int) -> int:
    """One past the last element of the first `count` chunks."""
    return cuts.chunks[count - 1][1] if count else 0


def _weights_costs(bucket: BucketFacts, offload: Offload) -> list[int]:
    """Bytes of each chunk of the slice."""
    chunks = offload.cuts(bucket.layout.slice_numel).chunks
    return [(stop - start) * bucket.dtype.itemsize for start, stop in chunks]
