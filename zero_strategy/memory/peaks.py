"""What lives inside a step only, at its largest: units that are whole, gradients on their way, the largest hand-over.

Each is a bound that a step reaches when units are used one after the other, in the order of registration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from zero_strategy.config import PipelineConfig, ZeroConfig
from zero_strategy.memory.bucket_facts import BucketFacts, Units
from zero_strategy.memory.ledger import Entry, Owner, allocated
from zero_strategy.sharding.placement import Placement
from zero_strategy.sharding.reducer import MAX_IN_FLIGHT

T = TypeVar("T")


def peaks_of(
    units: Units, config: ZeroConfig, placement: Placement, device_type: str, accumulation: int
) -> Iterator[Entry]:
    """The peaks of a training step on the device, activations left out.

    Args:
        units: Buckets by unit, the root first.
        config: A resolved config.
        placement: What is divided, and whether it stays in place.
        device_type: "cpu" or "cuda".
        accumulation: Micro-batches of a step.
    """
    if placement.shard_parameters and not placement.in_place:
        yield _gathered(units, config, device_type)
    yield from _in_flight(units, config, device_type, accumulation)
    largest = max((bucket.handed for unit in units for bucket in unit), default=0)  # until it is added to the bucket
    yield Entry("gradient buckets", "device", Owner("autograd"), largest, allocated(largest, device_type), peak=True)


def _gathered(units: Units, config: ZeroConfig, device_type: str) -> Entry:
    """The root, and the unit in use with those fetched ahead of it; all, if they stay until backward."""

    def asked(buckets: Sequence[BucketFacts]) -> int:
        return sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)

    def taken(buckets: Sequence[BucketFacts]) -> int:
        return sum(allocated(bucket.layout.numel * bucket.dtype.itemsize, device_type) for bucket in buckets)

    releases = config.release_after_forward and config.release_after_backward  # the latter where they are offloaded
    width = 1 + config.prefetch if releases else len(units)
    stay = held_whole([taken(unit) for unit in units], config.pipeline)
    others = [unit for number, unit in enumerate(units) if number and number not in stay]
    window = max(windows(others, width), key=lambda found: sum(map(taken, found)), default=[])
    held = [units[number] for number in sorted({0, *stay})]
    together = [bucket for unit in (*held, *window) for bucket in unit]
    return Entry("gather buffers", "device", Owner("units"), asked(together), taken(together), peak=True)


def held_whole(sizes: Sequence[int], pipeline: PipelineConfig) -> list[int]:
    """Which units a rank of a pipeline holds whole during a step, instead of gathering them for each micro-batch.

    Args:
        sizes: Bytes of each unit when it is whole, the root's first.
        pipeline: Of a resolved config.

    Returns:
        Their numbers; all that fit, in order.
    """
    assert pipeline.gather_bytes is not None, "resolve() derives pipeline.gather_bytes"
    left, found = pipeline.gather_bytes, list[int]()
    for number, size in enumerate(sizes):
        if size <= left:
            found.append(number)
            left -= size
    return found


def _in_flight(units: Units, config: ZeroConfig, device_type: str, accumulation: int) -> Iterator[Entry]:
    """Buffers of local gradients that live as long as their reduction, and copies in the dtype of the sum."""
    trained = [[bucket for bucket in unit if bucket.trainable] for unit in units]
    root, others = trained[0], [bucket for unit in trained[1:] for bucket in unit]
    if all(bucket.keeps_whole(config, accumulation) for bucket in (*root, *others)):  # of one config all do, or none
        filling: list[BucketFacts] = []
        sending = [*root, *others]
    else:
        filled = windows(others, MAX_IN_FLIGHT + 1)
        filling = [*root, *max(filled, key=lambda found: sum(b.gradient_bytes for b in found), default=[])]
        sent = windows([*root, *others], MAX_IN_FLIGHT)
        sending = list(max(sent, key=lambda found: sum(map(_copy_bytes, found)), default=[]))
    asked = sum(bucket.elements * bucket.gradient_dtype.itemsize for bucket in filling)
    taken = sum(allocated(bucket.gradient_bytes, device_type) for bucket in filling)
    yield Entry("gradient buckets", "device", Owner("reduction"), asked, taken, peak=True)
    asked = sum(bucket.elements * bucket.reduce_dtype.itemsize for bucket in sending if _copy_bytes(bucket))
    taken = sum(allocated(_copy_bytes(bucket), device_type) for bucket in sending)
    yield Entry("gradient buckets", "device", Owner("reduction copies"), asked, taken, peak=True)


def _copy_bytes(bucket: BucketFacts) -> int:
    same = bucket.reduce_dtype == bucket.gradient_dtype
    return 0 if same or not bucket.trainable else bucket.layout.numel * bucket.reduce_dtype.itemsize


def windows(items: Sequence[T], width: int) -> list[Sequence[T]]:
    """All runs of `width` neighbours; the whole, if it is shorter."""
    return [items[start : start + width] for start in range(max(1, len(items) - width + 1))] if items else []
