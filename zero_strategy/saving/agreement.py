"""What the ranks tell each other before a save: who holds which state, and whether anything hinders one of them.

Between two saves hardly anything changes but the step counts, which are the same everywhere. Then three numbers per
rank say all; the tables themselves travel when a rank's have changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from zero_strategy.distributed.save_board import FailedElsewhereError
from zero_strategy.optim.sharded import ShardedOptimizer
from zero_strategy.saving import references
from zero_strategy.saving.contents import OptimizerTable, States, own_table
from zero_strategy.saving.places import SavePlace

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

_AS_BEFORE, _BUSY, _KNOWS_PLACE = 1, 2, 4


@dataclass(frozen=True)
class Agreed:
    """What the ranks found out together.

    Attributes:
        tables: Of each optimizer, all ranks' entries together.
        token: Names this save; equal on all ranks.
        references: Parameter name -> digest, of frozen weights that are not stored.
        known: Whether all ranks know the folder that the checkpoint goes into.
    """

    tables: list[OptimizerTable]
    token: str
    references: dict[str, str]
    known: bool


@dataclass(frozen=True)
class _Contribution:
    tables: list[OptimizerTable]
    digests: dict[str, int]
    error: str | None


class Agreement:
    """The exchange before each save of one engine. A collective.

    Args:
        engine: The engine, or a weak proxy.
    """

    def __init__(self, engine: TrainState) -> None:
        self._engine = engine
        self._own: list[OptimizerTable] = []
        self._all: list[OptimizerTable] | None = None

    def reach(
        self,
        saved: list[ShardedOptimizer],
        states: list[States],
        place: SavePlace,
        *,
        frozen: Collection[str],
        busy: bool,
    ) -> Agreed:
        """Whatever is wrong on one rank is raised on all.

        Args:
            saved: The optimizers.
            states: This rank's state of each.
            place: Where the checkpoint goes.
            frozen: Parameters that are named by their digest.
            busy: Whether this rank still writes the checkpoint before.

        Raises:
            TypeError: Naming a state that cannot be stored.
            FailedElsewhereError: What is wrong on another rank.
            RuntimeError: A rank is busy, and the configuration does not let a save wait.
        """
        error, own, digests = None, list[OptimizerTable](), dict[str, int]()
        try:
            own = [own_table(self._engine, *each) for each in zip(saved, states, strict=True)]
            digests = references.own_digests(self._engine, frozen) if frozen else {}
        except Exception as caught:
            error = caught
        as_before = error is None and not frozen and self._is_as_before(own)
        flags = _AS_BEFORE * as_before | _BUSY * busy | _KNOWS_PLACE * place.known
        row = torch.tensor([flags, uuid.uuid4().int >> 80, _digest(own) if as_before else 0])
        rows = [row.tolist() for row in self._engine.mesh.team.control.exchange_small(row)]
        if all(flags & _AS_BEFORE for flags, _, _ in rows) and len({digest for _, _, digest in rows}) == 1:
            tables, referenced = self._with_scalars_of(own), dict[str, str]()
        else:
            tables, referenced = self._gather(own, digests, error, frozen)
        writing = [rank for rank, (flags, _, _) in enumerate(rows) if flags & _BUSY]
        if writing and self._engine.config.config.checkpoint.while_saving == "refuse":
            raise RuntimeError(
                f"{place.path}: the last checkpoint is still being written (by ranks {writing}), and "
                "checkpoint.while_saving is 'refuse'; save less often, or set it to 'wait'"
            )
        known = all(flags & _KNOWS_PLACE for flags, _, _ in rows)
        return Agreed(tables, f"{rows[0][1]:012x}", referenced, known)

    def _gather(
        self, own: list[OptimizerTable], digests: dict[str, int], error: Exception | None, frozen: Collection[str]
    ) -> tuple[list[OptimizerTable], dict[str, str]]:
        self._all = None
        mine = _Contribution(own, digests, None if error is None else f"{error}")
        everyone: list[_Contribution] = self._engine.mesh.team.control.gather_objects(mine)
        if error is not None:
            raise error
        if failed := {rank: other.error for rank, other in enumerate(everyone) if other.error is not None}:
            raise FailedElsewhereError(f"failed on other rank(s): {failed}")
        tables = [OptimizerTable() for _ in own]
        for other in everyone:
            for table, part in zip(tables, other.tables, strict=True):
                table.merge(part)
        self._own, self._all = own, tables
        return tables, references.total([other.digests for other in everyone], frozen)

    def _is_as_before(self, own: list[OptimizerTable]) -> bool:
        """Whether only values have changed, those of all parameters to the same."""
        return (
            self._all is not None
            and len(own) == len(self._own)
            and all(_same_form(*pair) for pair in zip(own, self._own, strict=True))
            and all(_is_uniform(table) for table in own)
            and all(bool(table.scalars) == bool(total.scalars) for table, total in zip(own, self._all, strict=True))
        )

    def _with_scalars_of(self, own: list[OptimizerTable]) -> list[OptimizerTable]:
        """All ranks' tables with this rank's values, which are everybody's."""
        assert self._all is not None
        return [
            OptimizerTable(
                total.kinds,
                {name: dict(next(iter(table.scalars.values()))) for name in total.scalars},
                total.scalar_dtypes,
            )
            for table, total in zip(own, self._all, strict=True)
        ]


def _same_form(a: OptimizerTable, b: OptimizerTable) -> bool:
    return a.kinds == b.kinds and a.scalar_dtypes == b.scalar_dtypes and a.scalars.keys() == b.scalars.keys()


def _is_uniform(table: OptimizerTable) -> bool:
    values = list(table.scalars.values())
    return all(_typed(value) == _typed(values[0]) for value in values)


def _typed(values: dict[str, Any]) -> list[tuple[str, str]]:
    """`True`, `1` and `1.0` are equal and not the same, and a NaN is not equal to itself."""
    return sorted((key, repr(value)) for key, value in values.items())


def _digest(tables: list[OptimizerTable]) -> int:
    """Of the values of each table, which are the same for all its parameters; 63 bits."""
    values = [_typed(next(iter(table.scalars.values()))) if table.scalars else [] for table in tables]
    return int(xxhash.xxh3_64_intdigest(repr(values).encode()) >> 1)
