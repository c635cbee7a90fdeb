"""Loaders of slots: batches of a DataLoader become those of a rank's slots, with random numbers of their own.

    indices of a slot (`SlotSampler`)  ->  SlotCollation: read the samples, collate them  ->  batch

What is drawn while a batch is read and collated (augmentation, masks of a language model) belongs to its samples and
the epoch, whichever rank and worker reads it, and whatever was read before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from zero_strategy.reproducible.samples import SampleIndex, SlotSampler
from zero_strategy.reproducible.streams import seed_of

_KEPT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Settings of a loader that a loader of slots takes over."""


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Inside, generators of the host (torch's, Python's, NumPy's legacy one) begin at a seed; afterwards as before."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed, which seeds GPUs, too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


class SlotData(Dataset[Any]):
    """A data set whose batches are read where they are collated; it has the attributes of the one inside.

    Args:
        dataset: With indices and a length.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[int]:
        """A whole batch at once, as torch's loaders ask for it: what is to be read."""
        return indices

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class SlotCollation:
    """Reads the samples of a slot and collates them, with random numbers of that batch.

    Args:
        dataset: The user's.
        collate: Makes a batch of a list of samples.
        sampler: Its seed is that of the random numbers.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[Any], Any], sampler: SlotSampler) -> None:
        self._dataset, self._collate, self._sampler = dataset, collate, sampler

    def __call__(self, indices: Sequence[int]) -> Any:
        first = indices[0]
        epoch = first.epoch if isinstance(first, SampleIndex) else 0
        with drawing(seed_of(self._sampler.seed, "batch", epoch, *map(int, indices))):
            return self._collate(_read(self._dataset, list(indices)))


def _read(dataset: Any, indices: list[int]) -> Any:
    at_once = getattr(dataset, "__getitems__", None)
    return at_once(indices) if at_once else [dataset[index] for index in indices]


class SlotBatches(BatchSampler):
    """Batches of a sampler of slots: each is a slot, or several one after the other.

    Args:
        sampler: Of the slots.
        batch_size: Samples of a batch.
        ranks: Those that get different batches.

    Attributes:
        num_processes: As `ranks`, under the name that Accelerate's shards of samplers have.
    """

    def __init__(self, sampler: SlotSampler, batch_size: int, ranks: int = 1) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.num_processes = ranks


def order_of(loader: DataLoader[Any], slots: int) -> bool:
    """True if a loader shuffles, False if it gives samples in their order.

    Args:
        loader: Of a training.
        slots: Of a step.

    Raises:
        ValueError: If ranks cannot have samples of slots from it; names why, and the way out.
    """
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        why = (
            f"its data set, a {type(dataset).__name__}, gives samples one after the other, so that no rank can take "
            "those of its slots: use a data set with a length and indices"
        )
    elif loader.batch_size is None:
        why = (
            f"it forms batches by a {type(loader.batch_sampler).__name__}: give it batch_size=, the samples of a slot, "
            "and shuffle="
        )
    elif isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(dataset)):
        why = "its RandomSampler repeats or leaves out samples: use shuffle=True"
    elif not isinstance(sampler, (RandomSampler, SequentialSampler, DistributedSampler, SlotSampler)):
        why = (
            f"its order is that of a {type(sampler).__name__}, of which ranks would take parts by their number: use "
            "shuffle=True, or an order of your own by torch.utils.data.Subset(dataset, order) and shuffle=False"
        )
    else:
        return isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False))
    raise ValueError(f"reproducible.slots is {slots}, and a DataLoader cannot be divided into slots: {why}")


def in_slots(loader: DataLoader[Any], slots: int, own: Sequence[int], seed: int | None) -> DataLoader[Any]:
    """A loader of this rank's slots, each of which is a batch, in the place of a loader.

    Args:
        loader: Its batches are as large; it shuffles, or not, and drops a last step of less, or fills it, as it says.
        slots: Of a step.
        own: This rank's.
        seed: Of the order, and of what is drawn; None: that of the loader's sampler, or 0.

    Raises:
        ValueError: As `order_of`.
    """
    shuffle, size = order_of(loader, slots), loader.batch_size
    assert size is not None
    seed = int(getattr(loader.sampler, "seed", 0)) if seed is None else seed
    samples = len(cast(Sized, loader.dataset))
    sampler = slot_sampler(loader) or SlotSampler(
        samples, slots, own, size, shuffle=shuffle, seed=seed, drop_last=loader.drop_last
    )
    return slot_loader(loader, sampler)


def slot_loader(loader: DataLoader[Any], sampler: SlotSampler, ranks: int | None = None) -> DataLoader[Any]:
    """A loader of this rank's slots in the place of a loader that `order_of` accepts; one of slots already stays.

    Args:
        loader: Its batches are as large as those of the result.
        sampler: Of this rank's slots.
        ranks: Those that get different batches, where batches are to tell (`SlotBatches`).
    """
    if isinstance(loader.dataset, SlotData):
        return loader
    assert loader.batch_size is not None
    collate = cast("Callable[[Any], Any]", loader.collate_fn)
    order: dict[str, Any] = {"batch_size": loader.batch_size, "sampler": sampler}
    if ranks is not None:
        order = {"batch_sampler": SlotBatches(sampler, loader.batch_size, ranks)}
    return DataLoader(
        SlotData(loader.dataset),
        collate_fn=SlotCollation(loader.dataset, collate, sampler),
        **order,
        **{name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)},
    )


def slot_sampler(loader: Any) -> SlotSampler | None:
    """The sampler of a loader of slots, also of one that a framework has wrapped, or skips batches of; None: no such.

    A loader whose `sampler` is a `SlotSampler` counts, too.
    """
    found = getattr(loader, "batch_sampler", None)
    while (inner := getattr(found, "batch_sampler", None)) is not None:
        found = inner
    for sampler in (getattr(found, "sampler", None), getattr(loader, "sampler", None)):
        if isinstance(sampler, SlotSampler):
            return sampler
    return None
