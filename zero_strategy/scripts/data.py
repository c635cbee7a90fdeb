"""Data loaders for scripts: one part of a dataset for each rank, and a loader that begins again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

T = TypeVar("T")


def distributed_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[int] | None = None,
    pin_memory: bool | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches.

    Samples are shuffled with the sampler's seed, the same way in each epoch unless `loader.sampler.set_epoch(epoch)` is
    called, and repeated so that every rank has as many.

    Args:
        dataset: With a length and indices.
        batch_size: Samples per micro-batch of this rank.
        rank: Of the data-parallel ranks.
        world_size: Number of data-parallel ranks.
        collate_fn: Makes a batch of a list of samples.
        sampler: Which samples this rank takes; default: torch's `DistributedSampler`.
        pin_memory: Page-locked batches; default: where there is a GPU.
        num_workers: Processes that load.
        drop_last: Leave an incomplete last batch out.

    Raises:
        TypeError: If the dataset cannot be divided among ranks.
    """
    if isinstance(dataset, (DataLoader, IterableDataset)) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"training_data must be a dataset with a length, to be divided among ranks, not {type(dataset).__name__}; "
            "leave training_data out and iterate over a loader of your own"
        )
    if sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    pinned = torch.cuda.is_available() if pin_memory is None else pin_memory and torch.cuda.is_available()
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        pin_memory=pinned,
        num_workers=num_workers,
        drop_last=drop_last,
    )


class RepeatingLoader(Generic[T]):
    """An iterator over a loader that begins again at its end, for ever.

    Args:
        loader: Any iterable that can be iterated over again.

    Raises:
        ValueError: If the loader is empty, when a batch is asked for.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for batch in self._iterator:
            return batch
        self._iterator = iter(self.loader)
        for batch in self._iterator:
            return batch
        raise ValueError(f"{type(self.loader).__name__} has no batches to repeat")
