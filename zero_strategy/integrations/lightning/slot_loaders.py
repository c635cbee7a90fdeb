"""Loaders of a Fabric whose steps are slots (`reproducible.slots`).

A loader that shuffles is one of a training: each rank gets the samples of its slots from it. Others are of evaluations,
and stay as Fabric makes them; to train with a batch of theirs is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from zero_strategy.config import ResolvedConfig
from zero_strategy.reproducible.accumulation import own_slots
from zero_strategy.reproducible.loaders import in_slots, slot_sampler


class WatchedLoader:
    """A loader of which is known whether a batch is in use; it has its attributes.

    Args:
        loader: The loader.
        slots: Its batches are slots.

    Attributes:
        slots: See the argument.
        in_use: Passes over it that are under way, each with a batch.
    """

    def __init__(self, loader: DataLoader[Any], *, slots: bool) -> None:
        self.__dict__.update(loader.__dict__)  # as Fabric's own wrapper
        self._loader, self.slots, self.in_use = loader, slots, 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.in_use += 1
            try:
                yield batch
            finally:
                self.in_use -= 1


class SlotLoaders:
    """The loaders that a Fabric has set up.

    Args:
        slots: Of a step; 0: it is no number of slots, and loaders stay as they are.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._watched: list[WatchedLoader] = []

    def take(self, loader: Any, resolved: ResolvedConfig, rank: int) -> Any:
        """The loader to use in the place of one that Fabric has given a sampler.

        Args:
            loader: Fabric's.
            resolved: The settings.
            rank: This one, among those with different samples.

        Raises:
            ValueError: If it is one of a training, and samples cannot be divided into slots; says why.
        """
        sampler = loader.sampler
        trains = isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False))
        if trains or slot_sampler(loader) is not None:
            seed = resolved.config.reproducible.seed
            loader, trains = in_slots(loader, self.slots, own_slots(resolved, rank), seed), True
        self._watched.append(WatchedLoader(loader, slots=trains))
        return self._watched[-1]

    def check_batch(self) -> None:
        """Raise if the batch of a forward that trains comes from a loader that gives ranks batches by their number.

        Raises:
            RuntimeError: Then; says what to do.
        """
        used = [loader for loader in self._watched if loader.in_use]
        if used and not any(loader.slots for loader in used):
            raise RuntimeError(
                f"reproducible.slots is {self.slots}, and this batch comes from a loader that gives ranks batches by "
                "their number: Fabric's loaders of a training shuffle; for another order give the DataLoader "
                "sampler=engine.slots.sampler(..., shuffle=False), and call "
                "setup_dataloaders(loader, use_distributed_sampler=False)"
            )
