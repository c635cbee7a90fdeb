"""The saver: at once, or from a snapshot in the background; one save at a time, never failing silently.

What training waits for is one small exchange of tables and a copy of this rank's bytes, in host memory or in files. All
the rest is a thread's business: it writes past the page cache and mostly waits for the disk. A failure is raised by the
next step on all ranks, by the next save, by `wait()`, and at exit.

With state in files, state that lies in files is not copied: what changes meanwhile is written elsewhere
(`offload.chunk_store`); state in memory is copied into files, a few megabytes at a time.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.agreement import Catalog, catalog_of, state_dict_entries, union_of_groups
from zero_strategy.checkpoint.contents import (
    OptimizerTable,
    average_file,
    groups_of,
    module_files,
    pieces_of,
    states_of,
    stored_dtype,
)
from zero_strategy.checkpoint.folders import prune
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import AVERAGE, EXPORT, FileKind, Manifest
from zero_strategy.checkpoint.module_state import module_entries, weight_descriptions
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.save_job import PendingSave, SaveJob, SavePlace, SavePlaces, prune_remote
from zero_strategy.checkpoint.writer import AnyPiece, Entry, LatePiece, Piece, SaveWriter, in_file_order
from zero_strategy.comm.store import SaveBoard, own_store, together
from zero_strategy.config import CheckpointConfig
from zero_strategy.offload.chunk_store import FileCopies, StateImages
from zero_strategy.offload.tier import HostMemory, Tier, streams_of
from zero_strategy.quantized.entries import kept_in_dtype
from zero_strategy.runtime.host_bytes import PAGE, AlignedArena

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState
from zero_strategy.checkpoint.agreement import REFERENCES, Agreed, Agreement, describe_references


class Snapshot:
    """Host memory that lies as the files do, so that it is written without another copy.

    The places of one plan's pieces are kept for the next time, which is then hardly more than the copies.

    Args:
        pinned: page-locked memory, for copies from a CUDA device.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._arena = AlignedArena(partial(HostMemory, pinned=True) if pinned else None)
        self._plan: CheckpointPlan | None = None
        self._keys: list[tuple[FileKind, str, int, int, torch.dtype]] = []
        self.places: list[torch.Tensor] = []
        self._copies: list[tuple[FileKind, Piece]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return self._arena.nbytes

    @torch.no_grad()
    def take(self, plan: CheckpointPlan, pieces: Iterable[Entry]) -> list[tuple[FileKind, Piece]]:
        """Copies pieces; what was copied before is given up.

        Args:
            plan: where the pieces go.
            pieces: views of live memory on any device.

        Returns:
            The same pieces in the order of the files' bytes, on the CPU.
        """
        live = list(pieces)
        keys = [(kind, piece.name, piece.start, piece.numel, piece.dtype) for kind, piece in live]
        if plan is not self._plan or keys != self._keys:
            self._lay_out(plan, live)
            self._plan, self._keys = plan, keys
        devices: dict[torch.device, None] = {}
        for place, (_, piece) in zip(self.places, live, strict=True):
            data = piece.loaded().data
            place.copy_(data, non_blocking=True)
            devices[data.device] = None
        for device in devices:  # on which the copies are queued, whatever the thread's current device is
            if (streams := streams_of(device)) is not None:
                # The next step changes what is being copied.
                streams.current().synchronize()
        return self._copies

    def _lay_out(self, plan: CheckpointPlan, live: list[Entry]) -> None:
        """Gives each piece its place."""
        self._plan = None  # not even half of the old places are valid any more
        ordered = in_file_order(plan, live)
        sizes = [piece.numel * piece.dtype.itemsize for _, piece in ordered]
        # A page for each: every place begins where its bytes do within a page of the file.
        self._arena.reserve(sum(sizes) + PAGE * len(sizes))
        self._copies, places = [], dict[int, torch.Tensor]()
        for (kind, piece), nbytes in zip(ordered, sizes, strict=True):
            layout = plan.layout_of(kind, piece.name)
            offset, _ = layout.span(piece.name, piece.start, piece.start + piece.numel)
            place = self._arena.take(nbytes, offset).view(piece.dtype)
            self._copies.append((kind, Piece(piece.name, piece.start, place)))
            places[id(piece)] = place
        self.places = [places[id(piece)] for _, piece in live]


class FileSnapshot:
    """Room in files for one snapshot at a time; it is kept for the next.

    Args:
        tier: Where it is.
    """

    def __init__(self, tier: Tier) -> None:
        self._copies = FileCopies(tier, "checkpoint")

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of copies that are asked for and taken; of state in files, `OffloadStores.spare_bytes` are."""
        return self._copies.nbytes

    def begin(self) -> StateImages:
        """Images for pieces that are read late; their `reader` is what `pieces_of` needs."""
        return StateImages(self._copies)

    def reserve(self, images: StateImages, live: Sequence[Entry]) -> None:
        """Make room.

        Args:
            images: Of what the late pieces read.
            live: What is to be saved.

        Raises:
            OSError: If there is not enough.
        """
        # Before anything is fixed, so that a rank without room can still save at once, with all others.
        images.reserve({name: piece.numel * piece.dtype.itemsize for name, piece in _in_memory(live)})

    def take(self, plan: CheckpointPlan, images: StateImages, live: Sequence[Entry]) -> list[Entry]:
        """Fix all values. The same arguments as for `reserve`.

        Returns:
            The same pieces in the order of the files' bytes, all to be read late.

        Raises:
            OSError: If the tier fails.
        """
        images.take()
        self._copies.write((name, piece.data) for name, piece in _in_memory(live))
        names = {id(piece): name for name, piece in _in_memory(live)}
        fixed = [(kind, self._late(names[id(piece)], piece) if id(piece) in names else piece) for kind, piece in live]
        return in_file_order(plan, fixed)

    def _late(self, name: str, piece: AnyPiece) -> LatePiece:
        load = partial(self._copies.read, name, piece.dtype)
        return LatePiece(piece.name, piece.start, piece.numel, piece.dtype, load)


def _in_memory(live: Iterable[Entry]) -> Iterable[tuple[str, Piece]]:
    """Pieces that have their values with them, each with a name for its copy."""
    for number, (_, piece) in enumerate(live):
        if isinstance(piece, Piece):
            yield f"piece {number}", piece


OWN = "zero_strategy"
"""Key of the engine's own entry in the manifest's user metadata."""
Fixed = tuple[StateImages, list[Entry]]
"""Images of state in tiers, and the pieces that are to be saved."""


class Saver:
    """The saves of one engine.

    Attributes:
        places: Facts about the folders that checkpoints go into.
        copied_bytes: Of copies in memory files that this process has written, and has got from another host.
    """

    def __init__(self, engine: TrainState) -> None:
        # The engine holds its saver; a circle would keep the model until a collection.
        self._engine = weakref.proxy(engine)
        self._snapshot = Snapshot(pinned=engine.device.type == "cuda")
        self._file_snapshot: FileSnapshot | None = None
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None
        self._last_lost = False
        self._board: SaveBoard | None = None
        self._last_plan: tuple[Any, CheckpointPlan] | None = None
        self._store: Any = None
        self._number = self.copied_bytes = 0
        self._agreement = Agreement(self._engine)
        self.places = SavePlaces(self._engine.config.config.checkpoint.layout)

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
                    self._pending, self._last_lost = None, pending.lost()

    def finish(self) -> None:
        """`wait`, and return when all that was replaced or is no longer kept is removed."""
        self.wait()
        if self._last is not None:
            self._last.finish()

    def then(self, action: Callable[[], object], *, failed: bool = False) -> None:
        """Do something as soon as no save is going on, if the last one succeeds, or (`failed`) if it fails."""
        if self._pending is not None:
            self._pending.then(action, failed=failed)
        elif failed == self._last_lost:
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
        writer: Callable[[SaveBoard, str], SaveWriter] | None = None,
        patience: float | None = None,
    ) -> PendingSave:
        """See `ZeroEngine.save`; with a `writer`, made from board and token, it is the caller's who keeps what.

        Args:
            patience: Seconds that a rank may show no sign of life; default: `checkpoint.timeout_seconds`.
        """
        engine, settings = self._engine, self._engine.config.config.checkpoint
        # Before the meeting: it is the same on all ranks.
        if weights_dtype is not None and optimizers:
            raise ValueError("weights_dtype is for weights alone, which cannot be resumed from: give optimizers=False")
        # Before the meeting, whose time-out is shorter than a save may take.
        if settings.while_saving == "wait":
            self.wait()
        # Ranks that do not come, or come with another path, are named within seconds.
        engine.mesh.world_group.barrier.wait_for_all(f"save({os.fspath(directory)!r})")
        engine.model.reducer.check_whole()
        engine.model.follow_edits()
        if optimizers and engine.average is not None:
            engine.average.check_not_shown("saving optimizer state")
        place = self.places.place_of(directory, asked=writer is None)
        saved = list(engine.optimizers) if optimizers else []
        states = [states_of(engine, sharded) for sharded in saved]
        # Nobody resumes from weights with nothing beside them that are not even the latest.
        export = not (optimizers or update_latest or user)
        entries = module_entries(engine) if export and not engine.is_part else None
        described = weight_descriptions(entries or {})
        whole = catalog_of(engine).beside(TensorSpec.of(name, tensor) for name, tensor in described.items())
        referenced = whole.frozen if (frozen or settings.frozen) == "reference" else frozenset[str]()
        agreed = self._agreement.reach(saved, states, place, frozen=referenced, busy=self.busy())
        if settings.while_saving == "refuse":
            self.wait()  # it is over on all ranks
        assert not self.busy(), "one save at a time: they share the snapshot's memory"
        # Behind the agreement: a save that is refused by all has no number.
        board, self._last_lost = self._next_board(patience), True
        try:
            order = [item for item in state_dict_entries(engine.module) if item[0] not in referenced]
            order += described.items()
            fixed: Fixed | None = None
            pieces = partial(pieces_of, engine, order, states, agreed.tables, weights_dtype)
            # Without room on one rank the save is at once on all.
            if asynchronous and engine.offloaded.files is not None:
                fixed = self._room_in_files(engine.offloaded.files, pieces)
                asynchronous = fixed is not None
            plan = self._plan(whole.without(referenced), agreed.tables, weights_dtype)
            groups = [union_of_groups(engine, groups_of(engine, sharded), whole.names()) for sharded in saved]
            manifest = self._manifest(plan, whole, agreed, groups, user, counters, export=export)
            job = SaveJob(  # in this order on all ranks: what meets or exchanges
                writer=(
                    self.places.writer(place, board, agreed.token, known=agreed.known)
                    if writer is None
                    else writer(board, agreed.token)
                ),
                board=board,
                plan=plan,
                extra_files={**extra_files, **module_files(engine, entries), **(average_file(engine) if saved else {})},
                own_files={**own_files, random_state.path_of(engine.mesh.world_group.rank): random_state.capture()},
                pieces=self._pieces(plan, pieces, fixed, asynchronous),
                manifest=manifest,
                update_latest=update_latest,
                committed=(lambda: None) if export or writer is not None else partial(_prune, place, settings),
            )
        except BaseException as error:
            # Others may be in the job already, and would wait there for the time-out.
            board.fail(f"{type(error).__name__}: {error}")
            raise
        # Behind the one before: removals of two saves go through one folder one after the other.
        pending = self._last = PendingSave(job, before=self._last)
        if asynchronous:
            self._pending = pending
            pending.start(settings.bytes_per_second or None)
        else:
            pending.run()
            self._last_lost = False
        return pending

    def _room_in_files(self, tier: Tier, pieces: Callable[..., Iterable[Entry]]) -> Fixed | None:
        """Get ready to fix state in files at this moment; None if some rank has no room for that. A collective."""
        if self._file_snapshot is None:
            self._file_snapshot = FileSnapshot(tier)
        snapshot, images = self._file_snapshot, self._file_snapshot.begin()

        def reserve() -> list[Entry]:
            live = list(pieces(values_of=images.reader))
            snapshot.reserve(images, live)
            return live

        try:
            return images, together(self._engine.mesh.world_group.control, reserve)
        # RuntimeError is how `together` tells of another rank.
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
        pieces: Callable[..., Iterable[Entry]],
        fixed: Fixed | None,
        asynchronous: bool,
    ) -> Sequence[Entry]:
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
        *,
        export: bool,
    ) -> Manifest:
        """Record of the training beside its tensors."""
        engine, tables = self._engine, agreed.tables
        own = {
            "scalar_dtypes": [table.scalar_dtypes for table in tables],
            "loss_scaler": None if engine.scaler is None else engine.scaler.state_dict(),
            REFERENCES: describe_references(whole, agreed.references),
            **({AVERAGE: engine.average.facts()} if engine.average is not None and tables else {}),
            **({EXPORT: True} if export else {}),
        }
        return plan.manifest(
            world_size=engine.mesh.world_group.world_size,
            stage=engine.stage,
            scalars={str(number): table.scalars for number, table in enumerate(tables)},
            param_groups={str(number): each for number, each in enumerate(groups)},
            counters=dict(counters),
            # The text is made at the end of the save, when the caller may have changed what he gave.
            user={**copy.deepcopy(dict(user)), OWN: own},
        )

    def _plan(self, whole: Catalog, tables: Sequence[OptimizerTable], dtype: torch.dtype | None) -> CheckpointPlan:
        """The files; those of the last save if nothing has changed."""
        key = (whole, [(table.kinds, table.shapes) for table in tables], dtype)
        # The same object as long as nothing changes: by that the snapshot knows its places.
        if self._last_plan is None or self._last_plan[0] != key:
            shapes = {spec.name: spec.shape for spec in whole.weights}
            states = {
                str(number): {
                    kind: [
                        TensorSpec(name, dtypes[name], table.shapes.get(kind, {}).get(name, shapes[name]))
                        # In the order of the model, whichever ranks hold the states.
                        for name in whole.names()
                        if name in dtypes
                    ]
                    for kind, dtypes in sorted(table.kinds.items())
                }
                for number, table in enumerate(tables)
            }
            kept = kept_in_dtype(whole.names())
            plan = CheckpointPlan.build(
                [
                    TensorSpec(spec.name, stored_dtype(spec.dtype, None if spec.name in kept else dtype), spec.shape)
                    for spec in whole.weights
                ],
                states,
                aliases={alias: name for alias, name in whole.aliases.items() if name in shapes},
                max_file_bytes=self._engine.config.config.checkpoint.max_file_bytes,
                metadata={"format": "pt"},
            )
            self._last_plan = (key, plan)
        return self._last_plan[1]

    def _next_board(self, patience: float | None) -> SaveBoard:
        world_group = self._engine.mesh.world_group
        timeout = patience or self._engine.config.config.checkpoint.timeout_seconds
        self._number += 1
        if self._store is None:
            # Kept for all saves: each connection is one of the store's server, too.
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
