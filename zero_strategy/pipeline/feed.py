"""Micro-batches for the first stage, which takes their inputs, and the last one, which takes their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zero_strategy.pipeline.errors import DataEndedError
from zero_strategy.runtime.torch_private import tree_map

BatchFunction = Callable[[Any], Any]


class Feed:
    """The micro-batches of one batch, read when they are needed.

    Args:
        data: Gives (inputs, labels); labels may be missing where nobody asks for them.
        needed: How many micro-batches there will be.
        batch_fn: Changes what `data` gives; None: as it is.
        device: Where tensors go.
        readers: How many times each micro-batch is asked for: its inputs, its labels or both.
    """

    def __init__(
        self,
        data: Iterator[Any] | None,
        needed: int,
        batch_fn: BatchFunction | None,
        device: torch.device,
        readers: int,
    ) -> None:
        self._data, self._needed, self._batch_fn, self._device = data, needed, batch_fn, device
        self._readers, self._read = readers, 0
        self._there: dict[int, tuple[Any, int]] = {}

    def load(self, micro_batch: int, stage: int) -> None:
        """Read up to a micro-batch.

        Raises:
            DataEndedError: If there are fewer.
            ValueError: If there is no iterator.
        """
        while self._read <= micro_batch:
            if self._data is None:
                raise ValueError(f"stage {stage} loads micro-batches, but this rank was given no data iterator")
            try:
                batch = next(self._data)
            except StopIteration as end:
                raise DataEndedError(
                    f"the data iterator of stage {stage} ended before micro-batch {self._read}; a batch needs "
                    f"{self._needed}. Drop the incomplete batch, or give an iterator that goes on (RepeatingLoader)",
                    stage, self._read, self._needed,
                ) from end  # fmt: skip
            if self._batch_fn is not None:
                batch = self._batch_fn(batch)
            if self._device.type != "cpu":
                batch = tree_map(self._move, batch)
            self._there[self._read] = batch, self._readers
            self._read += 1

    def take(self, micro_batch: int, part: int, stage: int) -> Any:
        """The inputs (part 0) or labels (part 1) of a micro-batch; None if it has no labels.

        Raises:
            DataEndedError: If there are not so many micro-batches.
            TypeError: If one is no tuple or list.
        """
        self.load(micro_batch, stage)
        batch, readers = self._there.pop(micro_batch)
        if readers > 1:
            self._there[micro_batch] = batch, readers - 1
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(
                f"the data iterator of stage {stage} gives {type(batch).__name__}; a pipeline takes pairs of inputs "
                "and labels (set_batch_fn can make them)"
            )
        return batch[part] if part < len(batch) else None

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
