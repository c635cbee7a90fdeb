"""Seeding a process, and the two streams of numbers of model-parallel training.

Dropout where weights are whole must be the same on all ranks of a model-parallel group (they compute the same), and
differ from group to group, which see different data: the device's default state. Where weights are divided it must
differ inside a group, and be the same across groups: the tracker's model-parallel state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_strategy.activation.model_parallel import ModelParallel
from zero_strategy.activation.rng import DEFAULT_NAME, CudaRNGStatesTracker

_MODEL_PARALLEL = 2718
"""What scripts expect between the seeds of the two states."""
_NEXT_GROUP = 100_003
"""Between the default seeds of neighbouring groups: farther than any group has ranks. The CPU's generator takes 32 bits
of a seed, so it may not be a power of two."""


def set_random_seed(seed: int) -> None:
    """Seed Python's `random`, NumPy's legacy generator, and torch on the CPU and all devices.

    Raises:
        TypeError: If the seed is no integer.
        ValueError: If it is not between 0 and 2**32 - 1, which is what NumPy takes.
    """
    _check_seed("set_random_seed", seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"set_random_seed({seed}): accepted: 0 to 2**32 - 1")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_model_parallel(tracker: CudaRNGStatesTracker, seed: int, place: ModelParallel) -> None:
    """Seed the default state of the tracker's device, and the tracker's only state; see above.

    Args:
        tracker: Is reset first.
        seed: The same on all ranks. The first group's default state has it.
        place: Of this process.
    """
    _check_seed("model_parallel_cuda_manual_seed", seed)
    own = seed + _NEXT_GROUP * place.data_rank
    if tracker.device.type == "cuda":
        torch.cuda.manual_seed(own)
    else:
        torch.default_generator.manual_seed(own)
    tracker.reset()
    tracker.add(DEFAULT_NAME, seed + _MODEL_PARALLEL + place.rank)


def _check_seed(call: str, seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{call} takes an integer, not {seed!r}")


@dataclass(frozen=True)
class RandomState:
    """Where the generators of a process are."""

    host: Tensor
    python: Any
    device: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """Of torch on the host and on the current CUDA device, and of Python."""
        device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(torch.get_rng_state(), random.getstate(), device)

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """As after seeding with it; the generators stay where they are."""
        with kept_random_state():
            torch.manual_seed(seed)
            random.seed(seed)
            return cls.now()

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.host)
        random.setstate(self.python)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """The generators are afterwards where they were before."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
