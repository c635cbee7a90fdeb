"""Partial sums over slots (`reproducible.slots`) that a rank holds inside of a step.

A rank that sums up its own micro-batches before they travel (`gradient_reduction: per_step`) holds them as full
buffers, one for each node of the tree that its slots so far make up; else it holds slices of the nodes that the slots
of its row make up. These are as many as the number of slots has binary ones, where the first is a multiple of a power
of two that is large enough:

    slots so far      1   2   3   4   5   6   7   8
    nodes             1   1   2   1   2   2   3   1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zero_strategy.config import ZeroConfig
from zero_strategy.planning.buckets import Units
from zero_strategy.planning.ledger import Entry, Owner, allocated
from zero_strategy.reproducible.slot_tree import cover
from zero_strategy.reproducible.slots import SlotPlaces


def sums_over_slots(units: Units, config: ZeroConfig, rank: int, device_type: str) -> Iterator[Entry]:
    """Partial sums at the fullest moment of a step, beside what a last backward sends; nothing without slots.

    Args:
        units: Buckets by unit.
        config: A resolved config.
        rank: A data-parallel one.
        device_type: "cpu" or "cuda".
    """
    if not config.reproducible.slots:
        return
    trained = [bucket for unit in units for bucket in unit if bucket.trainable]
    whole = [bucket.gradient_bytes for bucket in trained]
    slices = [bucket.layout.slice_numel * bucket.gradient_dtype.itemsize for bucket in trained]
    most = max(moments(config, rank), key=lambda each: each.full * sum(whole) + each.slices * sum(slices), default=NONE)
    asked = taken = 0
    for bucket, all_of_it, a_slice in zip(trained, whole, slices, strict=True):
        own = sum(piece.numel for piece in bucket.layout.pieces(*bucket.slice_of(rank)))
        asked += (most.full * bucket.elements + most.slices * own) * bucket.gradient_dtype.itemsize
        taken += most.full * allocated(all_of_it, device_type) + most.slices * allocated(a_slice, device_type)
    # Several results of an exchange are copied out of one buffer, bucket by bucket.
    results = max(counts_of_results(places_of(config), rank))
    twice = 0 if results == 1 else results * max(slices, default=0)
    asked, taken = asked + twice, taken + allocated(twice, device_type)
    yield Entry("gradient buckets", "device", Owner("sums over slots"), asked, taken, peak=True)


class Sums(NamedTuple):
    """Partial sums of every bucket.

    Attributes:
        full: Of all elements.
        slices: Of the elements of this rank's slice.
    """

    full: int
    slices: int


NONE = Sums(0, 0)


def places_of(config: ZeroConfig) -> SlotPlaces:
    """Slots of all data-parallel ranks of a resolved config."""
    mesh, per_step = config.mesh, config.gradient_reduction == "per_step"
    return SlotPlaces(config.reproducible.slots, mesh.replicate, mesh.shard or 1, per_step)


def sums_after(places: SlotPlaces, rank: int, micro_batches: int) -> Sums:
    """Sums that a data-parallel rank holds after some micro-batches of a step, but not all."""
    replica, shard = divmod(rank, places.shards)
    if places.per_step:
        first = places.slot(replica, shard, 0)
        return Sums(len(cover(places.slots, first, first + micro_batches)), 0)
    first, _ = places.row(replica)
    return Sums(0, len(cover(places.slots, first, first + micro_batches * places.shards)))


def moments(config: ZeroConfig, rank: int) -> Iterator[Sums]:
    """Sums that a data-parallel rank holds at the ends of the backwards of a step, before those of a slot are added.

    The buffers of the last backward of `per_step` are on their way, and not here.
    """
    places = places_of(config)
    if places.count == 1 and places.replicas == 1 and config.pipeline.chunks == 1:
        return  # one exchange gives the mean
    arriving = counts_of_results(places, rank)
    if not places.per_step:
        for micro, slices in enumerate(arriving):
            yield Sums(0, sums_after(places, rank, micro).slices + slices)
        return
    # The layers of a rank's first chunk have all of its slots before the last backward of the step.
    for micro in range(places.count - (config.pipeline.chunks == 1)):
        yield Sums(sums_after(places, rank, micro).full + 1, 0)
    yield Sums(0, sum(arriving))


def counts_of_results(places: SlotPlaces, rank: int) -> list[int]:
    """Results of each exchange of a data-parallel rank's row in a step."""
    replica, _ = divmod(rank, places.shards)
    micro_batches = range(1 if places.per_step else places.count)  # the last is as the first
    return [len(order.results) for micro in micro_batches for order in places.exchanges(replica, micro)]
