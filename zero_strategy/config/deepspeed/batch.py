"""The batch sizes of a DeepSpeed config: of the three numbers, two give the third."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchSettings:
    """What a config says about batch sizes, in samples. None: ``"auto"``, or not there."""

    train_batch_size: int | None = None
    """Samples of one optimizer step, all ranks together."""
    train_micro_batch_size_per_gpu: int | None = None
    """Samples that one rank takes in one forward pass."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; accepted: 1 or more")

    def resolve(self, world_size: int) -> BatchSettings:
        """Derives what is left open.

        Any two numbers give the third. Of one alone, accumulation counts as 1; accumulation alone says too little.

        Args:
            world_size: Number of data-parallel ranks.

        Raises:
            ValueError: If the numbers disagree, do not divide, or are too few; the arithmetic is spelled out.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; accepted: 1 or more")
        total, micro, steps = (getattr(self, name) for name in _NAMES)
        if total is None and micro is None:
            raise ValueError(
                "neither train_batch_size nor train_micro_batch_size_per_gpu is a number; give one of them, with "
                "gradient_accumulation_steps if that is not 1"
            )
        if total is None:
            steps = steps or 1
            return replace(self, train_batch_size=micro * steps * world_size, gradient_accumulation_steps=steps)
        if micro is None:
            steps = steps or 1
            micro = _share(total, "gradient_accumulation_steps", steps, "train_micro_batch_size_per_gpu", world_size)
        elif steps is None:
            steps = _share(total, "train_micro_batch_size_per_gpu", micro, "gradient_accumulation_steps", world_size)
        elif total != micro * steps * world_size:
            raise ValueError(
                f"train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {steps} x {world_size} ranks = "
                f"{micro * steps * world_size}; leave out one of the three"
            )
        return BatchSettings(total, micro, steps)


_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _share(total: int, name: str, value: int, wanted: str, world_size: int) -> int:
    share, rest = divmod(total, value * world_size)
    if rest:
        raise ValueError(
            f"train_batch_size {total} / ({name} {value} x {world_size} ranks) = {total / (value * world_size):g}, "
            f"which is no whole number of {wanted}; use a multiple of {value * world_size}"
        )
    return share
