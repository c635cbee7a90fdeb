"""Samples of slots: those of a step are the same whoever computes its slots, and so are their random changes.

`SlotSampler` gives each slot the samples that torch's `DistributedSampler` would give a rank, were there as many ranks
as slots. `SlotSamples` lets a dataset draw random numbers (augmentation) that belong to the sample and the epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from zero_strategy.reproducible.streams import seed_generators, seed_of


class SampleIndex(int):
    """Index of a sample that knows its epoch, for `SlotSamples`; to every other dataset a plain integer.

    Attributes:
        epoch: Of the sampler.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> SampleIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> Any:
        return SampleIndex, (int(self), self.epoch)


class SlotSampler(Sampler[int]):
    """Indices of the samples of one rank's slots, slot after slot, in groups of a micro-batch.

    In epoch e sample j of slot s in step t has place (t x batch_size + j) x slots + s of a permutation that depends on
    `seed` and e alone (torch's `DistributedSampler` of `slots` replicas). Every step has all of its slots: the last one
    is filled with samples of the epoch's beginning, or left out.

    Args:
        dataset: Something with a length, or that length.
        slots: Of a step.
        own: This rank's slots, in the order in which it computes them.
        batch_size: Samples of a slot.
        shuffle: Permute; else samples are in their order.
        seed: Of the permutation; equal on all ranks.
        drop_last: Leave samples out that do not fill a step.

    Attributes:
        epoch: Set by `set_epoch`.

    Raises:
        ValueError: If there is no sample, or with `drop_last` no step.
    """

    def __init__(
        self,
        dataset: Sized | int,
        slots: int,
        own: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        size = dataset if isinstance(dataset, int) else len(dataset)
        self.slots, self.own, self.batch_size = slots, list(own), batch_size
        self.shuffle, self.seed, self.drop_last, self.epoch, self._start = shuffle, seed, drop_last, 0, 0
        self._size, step = size, slots * batch_size
        if size < 1 or (drop_last and size < step):
            raise ValueError(
                f"{size} sample(s) make no step of {slots} slots of {batch_size}: use fewer slots, smaller "
                "micro-batches, or drop_last=False"
            )
        self.steps = size // step if drop_last else -(-size // step)

    def __len__(self) -> int:
        """Indices of a whole epoch."""
        return self.steps * len(self.own) * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Permute by another epoch from the next iteration on."""
        self.epoch = epoch

    def start_at(self, step: int) -> None:
        """Leave out the first steps of the next iteration, as after a load inside an epoch."""
        if not 0 <= step <= self.steps:
            raise ValueError(f"an epoch has {self.steps} steps, so none of them begins after {step}")
        self._start = step

    def order(self) -> list[int]:
        """Indices of all samples of the epoch, over all ranks, in the order of their places."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self._size, generator=generator).tolist()
        else:
            indices = list(range(self._size))
        wanted = self.steps * self.slots * self.batch_size
        repeated = indices * (-(-wanted // len(indices)))
        return repeated[:wanted]

    def __iter__(self) -> Iterator[int]:
        order, start, self._start = self.order(), self._start, 0
        for step in range(start, self.steps):
            for slot in self.own:
                for sample in range(self.batch_size):
                    place = (step * self.batch_size + sample) * self.slots + slot
                    yield SampleIndex(order[place], self.epoch)


class SlotSamples(Dataset[Any]):
    """A dataset whose samples are read with random numbers of their own: torch's, Python's and NumPy's.

    They depend on the seed, the epoch and the sample's index: not on the rank, the worker, or what was read before. The
    generators are afterwards where they were.

    Args:
        dataset: With `__getitem__` and a length.
        seed: Equal on all ranks.
    """

    def __init__(self, dataset: Dataset[Any], seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> Any:
        epoch = index.epoch if isinstance(index, SampleIndex) else 0
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            seed_generators(seed_of(self.seed, "sample", epoch, int(index)))
            return self.dataset[int(index)]
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several, each with its own random numbers; the dataset's own way to read many at once has none."""
        return [self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)
