"""How much of what is in files may stay in host memory: the largest `offload.resident_bytes` that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zero_strategy.memory.allowance import PAGE_BYTES
from zero_strategy.memory.bucket_facts import facts_of, placement_of
from zero_strategy.memory.plan import MemoryPlan
from zero_strategy.memory.staying import staying, staying_bytes, stop_of

_ENDLESS = 1 << 60


def with_resident(plan: MemoryPlan, nbytes: int) -> MemoryPlan:
    """The plan with another `offload.resident_bytes`."""
    return plan.changed(offload=replace(plan.offload, resident_bytes=nbytes))


def kept_bytes(plan: MemoryPlan) -> int:
    """Bytes of `offload.resident_bytes` that are used; a setting of just these keeps the same."""
    return staying_bytes(facts_of(plan.model, plan.resolved, plan.compute_dtype), plan.resolved, plan.offload)


def largest_resident(
    plan: MemoryPlan, fits: Callable[[MemoryPlan], bool], low: int, high: int | None = None
) -> int | None:
    """The largest `offload.resident_bytes` from `low` to `high` with which a plan fits; None if it does with none.

    No more than is used: what it keeps is what the next larger ones do that fit. `high` None: all that is in files.
    """
    if not fits(with_resident(plan, low)):
        return None
    most = kept_bytes(with_resident(plan, _ENDLESS if high is None else high))
    good, bad = low // PAGE_BYTES, max(most, low) // PAGE_BYTES + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(with_resident(plan, middle * PAGE_BYTES)):
            good = middle
        else:
            bad = middle
    return kept_bytes(with_resident(plan, max(good * PAGE_BYTES, low)))


def moved_bytes(plan: MemoryPlan, rank: int = 0) -> int:
    """Bytes of parameters and gradients that a rank reads from files and writes in a step of one micro-batch.

    Parameters are read for forward and for backward, read and written by the step; gradients are written once they are
    reduced, and read by the step. Clipping by a norm reads gradients once more, and is left out.
    """
    units, offload = facts_of(plan.model, plan.resolved, plan.compute_dtype), plan.offload
    stays, placement = staying(units, plan.resolved, offload), placement_of(plan.resolved)
    gradients_in_files = offload.gradient_tier(plan.resolved.gradient_reduction) == "nvme"
    total = 0
    for bucket in (bucket for unit in units for bucket in unit):
        here = stays[id(bucket)]
        if offload.parameters == "nvme":
            numel = bucket.layout.slice_numel
            left = numel - stop_of(offload.cuts(numel), here.weights)
            total += left * bucket.dtype.itemsize * (4 if bucket.trainable else 2)
        if gradients_in_files and bucket.trainable:
            start, stop = bucket.owned(placement, rank % plan.resolved.shard)
            cuts = offload.cuts(stop - start)
            left = stop - start - (stop_of(cuts, cuts.heads + here.gradients))
            total += 2 * left * bucket.gradient_dtype.itemsize
    return total
