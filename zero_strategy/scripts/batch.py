"""Batch arithmetic: samples per step = samples per rank and micro-batch * micro-batches per step * ranks."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """How many samples go where.

    Attributes:
        train: Samples per optimizer step over all ranks, or None if nobody said.
        micro: Samples per rank and micro-batch, or None if nobody said.
        accumulation: Micro-batches per optimizer step.
    """

    train: int | None
    micro: int | None
    accumulation: int


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world: int) -> BatchSizes:
    """Derive what is missing.

    Args:
        train: Samples per optimizer step over all ranks.
        micro: Samples per rank and micro-batch.
        accumulation: Micro-batches per step; 1 where it does not follow from the others.
        world: Data-parallel ranks.

    Returns:
        All three; without `train` and `micro` both stay unknown.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is not positive, they disagree, or do not divide; names them all.
    """
    for name, value in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, accumulation)):
        _check(name, value)
    if train is None:
        steps = accumulation or 1
        return BatchSizes(None if micro is None else micro * steps * world, micro, steps)
    if micro is None:
        steps = accumulation or 1
        return BatchSizes(train, _divided(train, steps, world, MICRO, f"{ACCUMULATION} {steps}"), steps)
    if accumulation is None:
        return BatchSizes(train, micro, _divided(train, micro, world, ACCUMULATION, f"{MICRO} {micro}"))
    if train != micro * accumulation * world:
        raise ValueError(
            f"{TRAIN} {train} is not {MICRO} {micro} * {ACCUMULATION} {accumulation} * {world} ranks = "
            f"{micro * accumulation * world}; leave one of the three out, and it is derived"
        )
    return BatchSizes(train, micro, accumulation)


def _divided(train: int, by: int, world: int, wanted: str, known: str) -> int:
    if train % (by * world):
        raise ValueError(
            f"{TRAIN} {train} is no multiple of {known} * {world} ranks = {by * world}, so that {wanted} would be no "
            f"integer; choose a multiple of {by * world}"
        )
    return train // (by * world)


def _check(name: str, value: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
