"""Whole batches, as a data loader gives them: their division into micro-batches, and the loss of one.

`PipelineModule.loss(batch)` is one call with two ways to go: where the module has the whole model and nothing trains it
as a pipeline, it is forward and loss function; else a `BatchRunner` carries out a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import tree_flatten, tree_flatten_with_path, tree_unflatten

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class BatchRunner(Protocol):
    """Trainer of a module in parts."""

    def loss(self, batch: Any) -> Tensor:
        """See `WholeBatches.loss`."""

    def outputs(self, inputs: Any, everywhere: bool) -> Any:
        """See `WholeBatches.outputs`."""


class WholeBatches(_Base):
    """Methods of a `PipelineModule` on whole batches.

    Attributes:
        runner: Who carries batches out; None: the module itself, which then has to have all layers.
    """

    num_stages: int
    loss_fn: Callable[..., Any] | None
    runner: BatchRunner | None = None

    def loss(self, batch: Any) -> Tensor:
        """The loss of a pair of inputs and labels, 0-d, on every rank.

        Where a pipeline is trained, all ranks call it, those of one pipeline with the same batch. With gradients
        enabled it runs the backwards as well, for in a pipeline these come before the last forwards.

        Raises:
            ValueError: If the batch cannot be divided, or this rank has a part of the layers and nobody runs them.
        """
        if self.runner is not None:
            return self.runner.loss(batch)
        self._check_whole("loss")
        inputs, labels = batch
        outputs = self(inputs)
        loss: Tensor = outputs if self.loss_fn is None else self.loss_fn(outputs, labels)
        return loss

    def outputs(self, inputs: Any, *, everywhere: bool = False) -> Any:
        """Outputs of the last layer for a batch of inputs, without gradients; all ranks call it.

        Args:
            inputs: What the first layer takes.
            everywhere: On all ranks of the pipeline. Else on that of the last layer, and None on the others.
        """
        if self.runner is not None:
            return self.runner.outputs(inputs, everywhere)
        self._check_whole("outputs")
        with torch.no_grad():
            return self(inputs)

    def _check_whole(self, call: str) -> None:
        if self.num_stages > 1:
            raise ValueError(
                f"PipelineModule.{call}() runs all {self.num_stages} stages, of which this rank has one, and no "
                "strategy has set the module up; call it in the steps of a Trainer with PipelineStrategy, or train "
                "with a PipelineEngine"
            )


def rows_of(batch: Any) -> int:
    """The size of the first dimension, which all tensors of a batch share.

    Raises:
        ValueError: If they do not, or there is no tensor with dimensions; names places and sizes.
    """
    sizes: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            sizes.setdefault(leaf.shape[0], "batch" + "".join(map(str, path)))
    if not sizes:
        raise ValueError(f"a pipeline divides the rows of a batch, and this one ({type(batch).__name__}) has no tensor")
    if len(sizes) > 1:
        found = ", ".join(f"{place} has {size}" for size, place in sizes.items())
        raise ValueError(f"a pipeline divides a batch by rows, dimension 0 of all its tensors, but {found}")
    return next(iter(sizes))


def split_batch(batch: Any, parts: int) -> list[Any]:
    """A batch in parts along dimension 0, of equal size, or by one row larger at the beginning.

    Args:
        batch: Tensors in tuples, lists, dicts. What is no tensor, and tensors without dimensions, are in every part.
        parts: How many.

    Raises:
        ValueError: If there are fewer rows than parts, or tensors have different numbers of rows.
    """
    rows = rows_of(batch)
    if rows < parts:
        raise ValueError(
            f"a batch of {rows} row(s) cannot be divided into {parts} micro-batches (pipeline.micro_batches); set "
            "drop_last=True on the DataLoader if it is the last one of an epoch, or make batches larger"
        )
    leaves, tree = tree_flatten(batch)
    divided = [
        leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() > 0 else [leaf] * parts for leaf in leaves
    ]
    return [tree_unflatten([leaf[part] for leaf in divided], tree) for part in range(parts)]


def join_parts(parts: Sequence[Any]) -> Any:
    """Outputs of micro-batches as one: tensors joined along dimension 0, 0-d ones stacked, the rest in lists."""
    leaves, trees = zip(*(tree_flatten(part) for part in parts), strict=True)
    return tree_unflatten([_join(found) for found in zip(*leaves, strict=True)], trees[0])


def _join(values: Sequence[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values)) if values[0].dim() == 0 else torch.cat(list(values))
    return values[0] if all(value is None for value in values) else list(values)
