"""A batch by which a model is looked at, in as many rows as are wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zero_strategy.auto.foreseen import Loss, states_kept
from zero_strategy.runtime.torch_private import tree_leaves, tree_map


@dataclass(frozen=True)
class Example:
    """A batch and the loss of it.

    Attributes:
        batch: Any nesting of tensors, whose first dimension is that of rows.
        loss: See `foreseen.Loss`.
        trains: Modules are in training mode when they train, whatever they are in now.
        autocast: Dtype of autocast around the loss; None: there is none, or the loss has its own.
    """

    batch: Any
    loss: Loss
    trains: bool = True
    autocast: torch.dtype | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch; 0: its tensors do not agree about it."""
        found = {tensor.shape[0] for tensor in self._tensors if tensor.dim()}
        return found.pop() if len(found) == 1 else 0

    @property
    def _tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]

    def of_rows(self, count: int) -> Example:
        """An example with another number of rows; those that are missing are repeated."""
        rows = self.rows
        assert rows, "a batch without rows is not divided"

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim():
                return value
            times = -(-count // rows)
            return value.repeat(times, *[1] * (value.dim() - 1))[:count] if times > 1 else value[:count]

        return replace(self, batch=tree_map(cut, self.batch))


_LOOKED_AT = 64
"""Items of a data set among which the largest ones make a batch."""


def of_dataset(dataset: Any, collate: Callable[[list[Any]], Any], rows: int, loss: Loss) -> Example | None:
    """A batch of a data set's largest items among its first ones; None: it cannot be looked at without being used up.

    Args:
        dataset: Of `__getitem__` and `__len__`.
        collate: Makes a batch of a list of items.
        rows: How many.
        loss: See `Loss`.
    """
    if not rows or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    with states_kept():
        items = [dataset[number] for number in range(min(_LOOKED_AT, len(dataset)))]
        if not items:
            return None
        items.sort(key=_elements, reverse=True)
        return Example(collate([items[number % len(items)] for number in range(rows)]), loss)


def _elements(item: Any) -> int:
    """Size of an item: of tensors and arrays the elements, of lists their length."""
    leaves = [item] if isinstance(item, Tensor) else tree_leaves(item)
    return sum(int(getattr(leaf, "size", 1)) if not isinstance(leaf, Tensor) else leaf.numel() for leaf in leaves)
