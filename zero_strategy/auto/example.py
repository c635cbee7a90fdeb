"""A batch by which a model is looked at, in as many rows as are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_strategy.auto.foreseen import Foreseen, Loss, MicroBatch, UnforeseenError, states_kept
from zero_strategy.auto.recomputation import MODES, Recomputation
from zero_strategy.auto.roof import Roof
from zero_strategy.config import ActivationCheckpointingConfig
from zero_strategy.planning.memory_plan import MemoryPlan
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


@dataclass(frozen=True)
class MicroBatchBytes:
    """Memory of a micro-batch, beside parameters and their gradients; see `Foreseen`.

    Of one that is counted, and not seen, there are `peak` and `made` alone.
    """

    peak: int = 0
    with_gradients: int = 0
    last: int = 0
    made: int = 0
    after_units: tuple[int, ...] = ()


class MicroBatches(Protocol):
    """Micro-batches of a model, by their rows."""

    modes: Sequence[str]
    """Of activation checkpointing, that are known."""
    tiles: bool
    """MLPs and the loss can be computed in tiles."""
    rows: int
    """Of the only ones that are known; 0: those of any rows are."""

    def knows(self, way: Recomputation) -> bool:
        """True if that way of recomputation is possible, and known."""

    def bytes_of(self, way: Recomputation, rows: int) -> MicroBatchBytes:
        """Memory of a micro-batch."""

    def seconds(self, way: Recomputation, rows: int, roof: Roof, *, maps: bool = False) -> float:
        """Time of forward and backward of one; with `maps` each block is mapped."""


Tiles = Callable[[int], AbstractContextManager[object]]
"""A context in which a model computes MLPs and the loss over so many tokens at a time."""


_MADE = 4
"""Times its activations that a transformer's micro-batch makes blocks."""
_OF_MLPS = 2 / 3
"""Part of a transformer's parameters, which tiles use once more in backward."""


class CountedRows:
    """Micro-batches of a model of plain numbers, whose blocks are counted (`TokenCosts`).

    Args:
        plan: Of the model.
        tokens: Of a row.
    """

    def __init__(self, plan: MemoryPlan, tokens: int) -> None:
        assert plan.model.costs is not None
        self._costs, self._tokens = plan.model.costs, tokens
        self._itemsize = (plan.compute_dtype or torch.float32).itemsize
        self._parameters = plan.model.parameters
        self.modes: Sequence[str] = MODES
        self.tiles, self.rows = True, 0

    def knows(self, way: Recomputation) -> bool:
        """See `MicroBatches`."""
        return True

    def bytes_of(self, way: Recomputation, rows: int) -> MicroBatchBytes:
        """See `MicroBatches`: all of them at once."""
        settings = ActivationCheckpointingConfig(way.mode, way.every_n or 2, way.budget or None, way.tile_tokens)
        peak = sum(self._costs.in_tiers(rows * self._tokens, self._itemsize, settings))
        return MicroBatchBytes(peak, made=_MADE * peak)

    def seconds(self, way: Recomputation, rows: int, roof: Roof, *, maps: bool = False) -> float:
        """See `MicroBatches`: two operations a parameter and token in a forward, four in a backward."""
        part = {"none": 0.0, "selective": 0.15, "budget": 1 - way.budget, "every_n": 1 / (way.every_n or 1)}
        again = 6.0 + 2.0 * part.get(way.mode, 1.0)
        again += 2.0 * _OF_MLPS if way.tile_tokens else 0.0
        made = self.bytes_of(Recomputation(), rows).peak if maps else 0
        return again * self._parameters * rows * self._tokens / roof.flops + roof.mapping(made)


class ForeseenRows:
    """Micro-batches of a model, by their rows: a few are run without memory, the others lie on lines.

    What keeps all is run with two numbers of rows. Of another way the largest micro-batch is run alone: the part of its
    figures that does not depend on rows is the same.

    Args:
        module: The model.
        example: A batch.
        units: Names of the modules that may be computed again.
        most: Rows of the largest micro-batch.
        dtype: That floating-point parameters take in computation; None: their own.
        tiles: In which the model computes in tiles; None: it cannot.

    Raises:
        UnforeseenError: If the model cannot be run without memory.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Example,
        units: list[str],
        most: int,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        self._module, self._example, self._units, self._dtype, self._tiles = module, example, units, dtype, tiles
        self._most = most or example.rows
        # Not one, if it can be helped, as a batch norm refuses that; it is on the line, too.
        self._least = min(2 if self._most > 2 else 1, self._most)
        self._ends: dict[Recomputation, tuple[Foreseen | None, Foreseen] | None] = {}
        self.rows = 0 if example.rows else self._most or 1
        self.tiles = tiles is not None
        self._ends[Recomputation()] = self._ends_of(Recomputation())
        known = [mode for mode in MODES if mode == "none" or (units and self.knows(Recomputation(mode)))]
        self.modes: Sequence[str] = known

    def knows(self, way: Recomputation) -> bool:
        """See `MicroBatches`."""
        if way not in self._ends:
            try:
                if not way.keeps_all and not self.knows(way.keeping_all()):
                    raise UnforeseenError("nor is it known without recomputation")
                self._ends[way] = self._ends_of(way)
            except UnforeseenError:
                self._ends[way] = None
        return self._ends[way] is not None

    def bytes_of(self, way: Recomputation, rows: int) -> MicroBatchBytes:
        """See `MicroBatches`; of a way that is not known: those of all that is kept."""
        names = ("peak", "with_gradients", "last", "made")
        one = {name: round(self._figure(way, rows, attrgetter(name))) for name in names}
        _, last = self._found(way)
        after = [
            round(self._figure(way, rows, lambda each, unit=unit: each.after_units[unit]))  # type: ignore[misc]
            for unit in range(len(last.after_units))
        ]
        return MicroBatchBytes(**one, after_units=tuple(after))

    def seconds(self, way: Recomputation, rows: int, roof: Roof, *, maps: bool = False) -> float:
        """See `MicroBatches`."""
        return self._figure(
            way,
            rows,
            lambda each: roof.seconds(each.work) + roof.mapping(each.made if maps else each.always_mapped),
        )

    def _figure(self, way: Recomputation, rows: int, of: Callable[[Foreseen], float]) -> float:
        first, last = self._found(way)
        end = of(last)
        if rows >= self._most:
            return end
        start = self._start(first, last, of)
        if first is None:
            start = max(0.0, min(end, self._start(*self._found(way.keeping_all()), of)))
        return start + (end - start) * rows / self._most

    def _start(self, first: Foreseen | None, last: Foreseen, of: Callable[[Foreseen], float]) -> float:
        """The figure of no rows."""
        if first is None or self._least == self._most:
            return of(last)
        return of(last) - (of(last) - of(first)) * self._most / (self._most - self._least)

    def _found(self, way: Recomputation) -> tuple[Foreseen | None, Foreseen]:
        found = self._ends[way if self.knows(way) else Recomputation()]
        assert found is not None
        return found

    def _ends_of(self, way: Recomputation) -> tuple[Foreseen | None, Foreseen]:
        last = self._run(way, self._most)
        return (self._fewest(way) or last) if way.keeps_all else None, last

    def _fewest(self, way: Recomputation) -> Foreseen | None:
        if not self._example.rows or self._least == self._most:
            return None
        try:
            return self._run(way, self._least)
        except UnforeseenError:
            if self._least > 1:
                raise
            return None  # no more than two rows take

    def _run(self, way: Recomputation, rows: int) -> Foreseen:
        example = self._example.of_rows(rows) if self._example.rows else self._example
        given = MicroBatch(
            self._module, example.batch, example.loss, self._units, self._dtype, example.autocast, example.trains
        )
        if way.tile_tokens:
            if self._tiles is None:
                raise UnforeseenError("the model has no tiles")
            given = given._replace(around=partial(self._tiles, way.tile_tokens))
        return way.foresee(given)


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
