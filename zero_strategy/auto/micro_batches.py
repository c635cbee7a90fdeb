"""Micro-batches of a model: what they take, by their rows and by what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import nn

from zero_strategy.activation.budget import Profile
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import Foreseen, MicroBatch, UnforeseenError, profile_units
from zero_strategy.auto.recomputation import MODES, Recomputation
from zero_strategy.auto.roof import Roof
from zero_strategy.config import ActivationCheckpointingConfig, ZeroConfig
from zero_strategy.planning.memory_plan import MemoryPlan


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


def may_tile(config: ZeroConfig) -> bool:
    """True if tiles go with the mesh: ranks divide neither tokens, layers nor experts."""
    mesh = config.mesh
    return mesh.sequence == 1 and mesh.expert == 1 and (mesh.tensor or 1) == 1


_MADE = 4
"""Bytes of blocks that a transformer's micro-batch makes, over those that it keeps: 3.7 in the median of 121 models."""
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
        self.tiles, self.rows = may_tile(plan.resolved.config), 0

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
        made = self.bytes_of(Recomputation(), rows).made if maps else 0
        return again * self._parameters * rows * self._tokens / roof.flops + roof.mapping(made)


class _Line(NamedTuple):
    """Figures by rows: two runs, or one, which has the figures of no rows from another line.

    Attributes:
        least, most: Rows of the runs.
        first, last: The runs; None: there is one alone.
        other: A line of a way that keeps all.
    """

    least: int
    most: int
    first: Foreseen | None
    last: Foreseen
    other: _Line | None = None

    def at(self, rows: int, of: Callable[[Foreseen], float]) -> float:
        """A figure of so many rows, at most `most`."""
        end = of(self.last)
        if rows >= self.most:
            return end
        start = self._start(of)
        return start + (end - start) * rows / self.most

    def _start(self, of: Callable[[Foreseen], float]) -> float:
        end = of(self.last)
        if self.first is not None and self.least < self.most:
            return end - (end - of(self.first)) * self.most / (self.most - self.least)
        return end if self.other is None else max(0.0, min(end, self.other._start(of)))

    @property
    def units(self) -> int:
        """Forwards of units; 0: runs differ in that."""
        counts = {len(each.after_units) for each in (self.first, self.last) if each is not None}
        counts |= set() if self.other is None else {self.other.units}
        return counts.pop() if len(counts) == 1 else 0


class ForeseenRows:
    """Micro-batches of a model, by their rows: a few are run without memory, the others lie on lines.

    What keeps all is run with two numbers of rows. Where units are computed again, the largest micro-batch is run
    alone: the part of its figures that does not depend on rows is the same. With tiles, of which few rows have none,
    each number of rows is run.

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
        self._runs: dict[tuple[Recomputation, int], Foreseen | None] = {}
        self._profiles: dict[tuple[int, int], Profile | None] = {}
        self._most = most or example.rows
        # Not one, if it can be helped, as a batch norm refuses that; it is on the line, too.
        least = min(2 if self._most > 2 else 1, self._most)
        self.rows = 0 if example.rows else self._most or 1
        self.tiles = tiles is not None
        last = self._run(Recomputation(), self._most)
        first = self._least(least) if example.rows and least < self._most else last
        self._plain = _Line(least, self._most, first, last)
        known = [mode for mode in MODES if mode == "none" or (units and self.knows(Recomputation(mode)))]
        self.modes: Sequence[str] = known

    def knows(self, way: Recomputation) -> bool:
        """See `MicroBatches`."""
        return way == Recomputation() or self._tried(way, self._most) is not None

    def bytes_of(self, way: Recomputation, rows: int) -> MicroBatchBytes:
        """See `MicroBatches`; of tiles that are not known: without them, and of other ways: as if all were kept."""
        line, names = self._line(way, rows), ("peak", "with_gradients", "last", "made")
        one = {name: round(line.at(rows, attrgetter(name))) for name in names}
        after = [
            round(line.at(rows, lambda each, unit=unit: each.after_units[unit]))  # type: ignore[misc]
            for unit in range(line.units)
        ]
        return MicroBatchBytes(**one, after_units=tuple(after))

    def seconds(self, way: Recomputation, rows: int, roof: Roof, *, maps: bool = False) -> float:
        """See `MicroBatches`."""

        def of(each: Foreseen) -> float:
            return roof.seconds(each.work) + roof.mapping(each.made if maps else each.always_mapped)

        return self._line(way, rows).at(rows, of)

    def _line(self, way: Recomputation, rows: int) -> _Line:
        if way.tile_tokens:
            exact = self._tried(way, min(rows, self._most))
            return self._line(way._replace(tile_tokens=0), rows) if exact is None else _Line(rows, rows, None, exact)
        if way == Recomputation() or (last := self._tried(way, self._most)) is None:
            return self._plain
        return _Line(self._most, self._most, None, last, self._plain)

    def _tried(self, way: Recomputation, rows: int) -> Foreseen | None:
        """A run; None: it fails."""
        if (way, rows) not in self._runs:
            try:
                self._runs[way, rows] = self._run(way, rows)
            except UnforeseenError:
                self._runs[way, rows] = None
        return self._runs[way, rows]

    def _least(self, rows: int) -> Foreseen | None:
        try:
            return self._run(Recomputation(), rows)
        except UnforeseenError:
            if rows > 1:
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
        return way.foresee(given, lambda: self._profile(given, way.tile_tokens, rows))

    def _profile(self, given: MicroBatch, tile_tokens: int, rows: int) -> Profile | None:
        if (tile_tokens, rows) not in self._profiles:
            self._profiles[tile_tokens, rows] = profile_units(given)
        return self._profiles[tile_tokens, rows]
