"""Batch arithmetic: samples per step = samples per rank and micro-batch x micro-batches per step x ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .rules import wrong_type

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSettings:
    """What a config says about batch sizes, in samples; of the three numbers, two give the third.

    None: ``"auto"``, or not there.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is less than 1.
    """

    train_batch_size: int | None = None
    """Samples of one optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: int | None = None
    """Samples that one rank takes in one forward pass."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(wrong_type(name, value, "int", None))
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; accepted: 1 or more")

    def resolve(self, world_size: int) -> BatchSettings:
        """Derives what is left open, all three.

        Any two numbers give the third. Of one alone, accumulation counts as 1; accumulation alone says too little.

        Args:
            world_size: Number of data-parallel ranks.

        Raises:
            ValueError: If the numbers disagree, do not divide, or are too few; the arithmetic is spelled out.
        """
        if self.train_batch_size is None and self.train_micro_batch_size_per_gpu is None:
            raise ValueError(
                f"neither {TRAIN} nor {MICRO} is a number; give one of them, with {ACCUMULATION} if that is not 1"
            )
        return self.derive(world_size)

    def derive(self, world_size: int) -> BatchSettings:
        """Like `resolve`; where only accumulation is known, or nothing, the sizes stay unknown.

        Raises:
            ValueError: If the numbers disagree or do not divide; the arithmetic is spelled out.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; accepted: 1 or more")
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if total is None:
            steps = steps or 1
            whole = None if micro is None else micro * steps * world_size
            return replace(self, train_batch_size=whole, gradient_accumulation_steps=steps)
        if micro is None:
            steps = steps or 1
            micro = _share(total, ACCUMULATION, steps, MICRO, world_size)
        elif steps is None:
            steps = _share(total, MICRO, micro, ACCUMULATION, world_size)
        elif total != micro * steps * world_size:
            raise ValueError(
                f"{TRAIN} is {total}, but {MICRO} {micro} x {ACCUMULATION} {steps} x {world_size} ranks = "
                f"{micro * steps * world_size}; leave out one of the three"
            )
        return BatchSettings(total, micro, steps)


_NAMES = (TRAIN, MICRO, ACCUMULATION)


def _share(total: int, name: str, value: int, wanted: str, world_size: int) -> int:
    share, rest = divmod(total, value * world_size)
    if rest:
        raise ValueError(
            f"{TRAIN} {total} / ({name} {value} x {world_size} ranks) = {total / (value * world_size):g}, "
            f"which is no whole number of {wanted}; use a multiple of {value * world_size}"
        )
    return share
