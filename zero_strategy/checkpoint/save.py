"""The saver: what ranks agree before a save, at once or in the background, one save at a time.

who holds which state, and whether anything hinders one of them.

Between two saves hardly anything changes but the step counts, which are the same everywhere. Then three numbers per
rank say all; the tables themselves travel when a rank's have changed.

at once, or from a snapshot in the background; one at a time, never failing silently.

What training waits for is one small exchange of tables and a copy of this rank's bytes in host memory. All the rest is
a thread's business: it writes past the page cache and mostly waits for the disk. A failure is raised by the next step
on all ranks, by the next save, by `wait()`, and at exit.
"""

from __future__ import annotations

import copy
import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import xxhash

from zero_strategy.checkpoint import random_state, references
from zero_strategy.checkpoint.contents import (
    Catalog,
    OptimizerTable,
    States,
    catalog_of,
    extra_state_file,
    groups_of,
    own_table,
    pieces_of,
    state_dict_entries,
    states_of,
    stored_dtype,
    union_of_groups,
)
from zero_strategy.checkpoint.folders import prune
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import CheckpointPlan, FileKind, Manifest
from zero_strategy.checkpoint.save_job import PendingSave, SaveJob, SavePlace, SavePlaces, prune_remote
from zero_strategy.checkpoint.snapshot import AnyPiece, FileSnapshot, Snapshot
from zero_strategy.checkpoint.writer import in_file_order
from zero_strategy.comm.barrier import together
from zero_strategy.comm.store import FailedElsewhereError, SaveBoard, own_store
from zero_strategy.config import CheckpointConfig
from zero_strategy.offload.chunk_store import StateImages
from zero_strategy.offload.tier import Tier
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState


_AS_BEFORE, _BUSY, _KNOWS_PLACE = 1, 2, 4


@dataclass(frozen=True)
class Agreed:
    """Findings that the ranks agreed on.

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
        rows = [row.tolist() for row in self._engine.mesh.world_group.control.all_gather_small(row)]
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
        everyone: list[_Contribution] = self._engine.mesh.world_group.control.all_gather_objects(mine)
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
        """True if only values have changed, those of all parameters to the same."""
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

OWN = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""
Fixed = tuple[StateImages, list[tuple[FileKind, AnyPiece]]]
"""Images of state in tiers, and the pieces that are to be saved."""


class Saver:
    """The saves of one engine."""

    def __init__(self, engine: TrainState) -> None:
        self._engine = weakref.proxy(engine)
        self._snapshot = Snapshot(pinned=torch.cuda.is_available())
        self._file_snapshot: FileSnapshot | None = None
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None
        self._board: SaveBoard | None = None
        self._last_plan: tuple[Any, CheckpointPlan] | None = None
        self._store: Any = None
        self._number = 0
        self._agreement = Agreement(self._engine)
        self._places = SavePlaces(self._engine.config.config.checkpoint.layout)

    @property
    def places(self) -> SavePlaces:
        """Facts about the folders that checkpoints go into."""
        return self._places

    @property
    def snapshot_bytes(self) -> int:
        """Host memory kept for the snapshots of background saves."""
        return self._snapshot.nbytes

    @property
    def snapshot_file_bytes(self) -> tuple[int, int]:
        """Bytes in files kept for them that are asked for and taken: copies, and places for what changes meanwhile."""
        copies = (0, 0) if self._file_snapshot is None else self._file_snapshot.nbytes
        spares = self._engine.offloaded.spare_bytes
        return copies[0] + spares[0], copies[1] + spares[1]

    def failed(self) -> bool:
        """True if a save in the background has failed and nobody was told."""
        return self._pending is not None and self._pending.failed()

    def wait(self) -> None:
        """Return when no save is going on; raises what went wrong with the last one."""
        pending = self._pending
        if pending is not None:
            try:
                pending.wait()
            finally:
                if pending.done():  # not after a Ctrl-C: the snapshot is still being read
                    self._pending = None

    def finish(self) -> None:
        """`wait`, and return when all that was replaced or is no longer kept is removed."""
        self.wait()
        if self._last is not None:
            self._last.finish()

    def then(self, action: Callable[[], object], *, failed: bool = False) -> None:
        """Do something as soon as no save is going on, if the last one succeeds, or (`failed`) if it fails."""
        if self._pending is not None:
            self._pending.then(action, failed=failed)
        elif not failed:
            action()

    def rest(self) -> None:
        """Return when no save reads this rank's state any more; what went wrong is told where it always is."""
        if self._pending is not None:
            self._pending.join()

    def busy(self) -> bool:
        """True if a save goes on on this rank."""
        return self._pending is not None and not self._pending.done()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        user: Mapping[str, Any],
        extra_files: Mapping[str, bytes],
        own_files: Mapping[str, bytes],
        counters: Mapping[str, Any],
        optimizers: bool,
        update_latest: bool,
        asynchronous: bool,
        weights_dtype: torch.dtype | None,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave:
        """See `ZeroEngine.save`."""
        engine, settings = self._engine, self._engine.config.config.checkpoint
        if weights_dtype is not None and optimizers:
            raise ValueError("weights_dtype is for weights alone, which cannot be resumed from: give optimizers=False")
        if settings.while_saving == "wait":
            self.wait()
        engine.mesh.world_group.barrier.wait_for_all(f"save({os.fspath(directory)!r})")
        engine.model.reducer.check_whole()
        engine.model.follow_edits()
        place = self._places.place_of(directory)
        saved = list(engine.optimizers) if optimizers else []
        states = [states_of(engine, sharded) for sharded in saved]
        whole = catalog_of(engine)
        referenced = whole.frozen if (frozen or settings.frozen) == "reference" else frozenset[str]()
        agreed = self._agreement.reach(saved, states, place, frozen=referenced, busy=self.busy())
        if settings.while_saving == "refuse":
            self.wait()  # it is over on all ranks
        assert not self.busy(), "one save at a time: they share the snapshot's memory"
        board = self._next_board()
        try:
            order = [item for item in state_dict_entries(engine.module) if item[0] not in referenced]
            fixed: Fixed | None = None
            pieces = partial(pieces_of, engine, order, states, agreed.tables, weights_dtype)
            if asynchronous and engine.offloaded.files is not None:
                fixed = self._room_in_files(engine.offloaded.files, pieces)
                asynchronous = fixed is not None
            plan = self._plan(whole.without(referenced), agreed.tables, weights_dtype)
            groups = [union_of_groups(engine, groups_of(engine, sharded), whole.names()) for sharded in saved]
            manifest = self._manifest(plan, whole, agreed, groups, user, counters)
            job = SaveJob(  # in this order on all ranks: what meets or exchanges
                writer=self._places.writer(place, board, agreed.token, known=agreed.known),
                board=board,
                plan=plan,
                extra_files={**extra_files, **extra_state_file(engine)},
                own_files={**own_files, random_state.path_of(engine.mesh.world_group.rank): random_state.capture()},
                pieces=self._pieces(plan, pieces, fixed, asynchronous),
                manifest=manifest,
                update_latest=update_latest,
                committed=partial(_prune, place, settings),
            )
        except BaseException as error:
            board.fail(f"{type(error).__name__}: {error}")
            raise
        pending = self._last = PendingSave(place.path, job, before=self._last)
        if asynchronous:
            self._pending = pending
            pending.start(settings.bytes_per_second or None)
        else:
            pending.run()
        return pending

    def _room_in_files(self, tier: Tier, pieces: Callable[..., Iterable[tuple[FileKind, AnyPiece]]]) -> Fixed | None:
        """Get ready to fix state in files at this moment; None if some rank has no room for that. A collective."""
        if self._file_snapshot is None:
            self._file_snapshot = FileSnapshot(tier)
        snapshot, images = self._file_snapshot, self._file_snapshot.begin()

        def reserve() -> list[tuple[FileKind, AnyPiece]]:
            live = list(pieces(values_of=images.reader))
            snapshot.reserve(images, live)
            return live

        try:
            return images, together(self._engine.mesh.world_group.control, reserve)
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"a save in the background needs room in offload.nvme_path, so that the state it writes can change "
                f"meanwhile; this one is written at once: {error}",
                stacklevel=3,
            )
            return None

    def _pieces(
        self,
        plan: CheckpointPlan,
        pieces: Callable[..., Iterable[tuple[FileKind, AnyPiece]]],
        fixed: Fixed | None,
        asynchronous: bool,
    ) -> Sequence[tuple[FileKind, AnyPiece]]:
        """Contents that this rank writes: live, or, in the background, such that training does not change it."""
        if fixed is not None:
            assert self._file_snapshot is not None
            return self._file_snapshot.take(plan, *fixed)
        return self._snapshot.take(plan, pieces()) if asynchronous else in_file_order(plan, pieces())

    def _manifest(
        self,
        plan: CheckpointPlan,
        whole: Catalog,
        agreed: Agreed,
        groups: list[list[dict[str, Any]]],
        user: Mapping[str, Any],
        counters: Mapping[str, Any],
    ) -> Manifest:
        """Record of the training beside its tensors."""
        engine, tables = self._engine, agreed.tables
        own = {
            "scalar_dtypes": [table.scalar_dtypes for table in tables],
            "loss_scaler": None if engine.scaler is None else engine.scaler.state_dict(),
            references.KEY: references.describe(whole, agreed.references),
        }
        return plan.manifest(
            world_size=engine.mesh.world_group.world_size,
            stage=engine.stage,
            scalars={str(number): table.scalars for number, table in enumerate(tables)},
            param_groups={str(number): each for number, each in enumerate(groups)},
            counters=dict(counters),
            user={**copy.deepcopy(dict(user)), OWN: own},
        )

    def _plan(self, whole: Catalog, tables: Sequence[OptimizerTable], dtype: torch.dtype | None) -> CheckpointPlan:
        """The files; those of the last save if nothing has changed."""
        key = (whole, [table.kinds for table in tables], dtype)
        if self._last_plan is None or self._last_plan[0] != key:
            shapes = {spec.name: spec.shape for spec in whole.weights}
            states = {
                str(number): {
                    kind: [TensorSpec(name, dtypes[name], shapes[name]) for name in whole.names() if name in dtypes]
                    for kind, dtypes in sorted(table.kinds.items())
                }
                for number, table in enumerate(tables)
            }
            plan = CheckpointPlan.build(
                [TensorSpec(spec.name, stored_dtype(spec.dtype, dtype), spec.shape) for spec in whole.weights],
                states,
                aliases={alias: name for alias, name in whole.aliases.items() if name in shapes},
                max_file_bytes=self._engine.config.config.checkpoint.max_file_bytes,
                metadata={"format": "pt"},
            )
            self._last_plan = (key, plan)
        return self._last_plan[1]

    def _next_board(self) -> SaveBoard:
        world_group, timeout = self._engine.mesh.world_group, self._engine.config.config.checkpoint.timeout_seconds
        self._number += 1
        if self._store is None:
            self._store = own_store(world_group.world_size)
        key = f"{world_group.barrier.prefix}/{self._number}"
        # All ranks have met since the save before, so all have left it.
        watchdog = self._engine.mesh.watchdog
        lost = {} if watchdog is None else {"lost": watchdog.lost}
        self._board = SaveBoard(
            world_group.rank, world_group.world_size, timeout, key, self._store, earlier=self._board, **lost
        )
        return self._board


def _prune(place: SavePlace, settings: CheckpointConfig) -> None:
    """Remove what the settings no longer keep; a checkpoint too many is no reason to fail."""
    if settings.keep_last:
        try:
            (prune_remote if place.remote else prune)(place.parent, settings.keep_last, settings.keep_every)
        except Exception as error:
            warnings.warn(f"{place.parent}: an old checkpoint could not be removed: {error}", stacklevel=2)
