"""Pieces on hosts that share no directory: written per host, exchanged while loading.

a checkpoint directory of the same name on each of them.

    rank 0                                                     leader of each other host       other ranks
    gather reports; send "described": manifest, small files
    seal: small files, manifest, fsync -- "sealed"             seal -- "sealed"                "sealed"
    wait for all
    rename -- "decided"                                        wait; rename -- "renamed"       "renamed"
    wait for all "renamed", then `latest`                      wait, then `latest`

Before "decided" nothing is renamed anywhere; from then on every host has the new checkpoint complete, under its name or
still in `.T.<token>.tmp`. A host that dies between the two leaves hosts with different checkpoints under one name.
Loading sees that by the manifests' `save` and takes the one that is complete on all hosts; so a sealed temporary
directory is removed only after a later save has been renamed.

saves are not mixed, and hosts give one another what they lack.

Same shape, same hosts, stages 1 to 3: all slices of a rank lie on its own host. What lies elsewhere are buffers, which
rank 0 wrote; what ranks hold whole (stage 0), what replicas hold, and after a change of shape any slice. That travels
in messages of bounded size, to all ranks alike, of which each keeps what it wants: slow for a large model in another
shape, where merging first is better, and nothing to speak of for buffers.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.checkpoint.disk import (
    DiskWriter,
    all_beside,
    beside,
    create_file,
    remove,
    replace_directory,
    replace_file,
    sync,
    write_file,
)
from zero_strategy.checkpoint.folders import make_signed, remove_leftovers, remove_leftovers_of
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import (
    LATEST_NAME,
    MANIFEST_NAME,
    RECEIPTS_NAME,
    CheckpointPlan,
    FileKind,
    Manifest,
)
from zero_strategy.checkpoint.pieces.format import Slice, rank_path, small_path
from zero_strategy.checkpoint.pieces.reader import PieceReader
from zero_strategy.checkpoint.pieces.writer import Board, PieceWriter, Sink
from zero_strategy.checkpoint.state_reader import StateReader, Wanted
from zero_strategy.checkpoint.writer import check_free_space, check_replaceable
from zero_strategy.runtime.host_bytes import Seen

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState


class HostPieceWriter(PieceWriter):
    """One rank's part in saving a checkpoint in pieces, into its host's own directory.

    Args:
        directory: where the checkpoint will be, on this host.
        rank, world_size, token, board: see `PieceWriter`.
        leader: the rank that prepares and renames on this host: the lowest of those that see this directory.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, rank: int, world_size: int, token: str, board: Board, leader: int
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, token=token, board=board)
        self.directory = Path(os.path.abspath(directory))
        self.temporary = beside(self.directory, token, "tmp")
        self._shadow = beside(self.directory, token, "old")
        self._first = rank == leader
        self.leads = self._first and rank != 0

    def prepare(self, plan: CheckpointPlan) -> None:
        """Makes the temporary directory; what earlier saves of this target left unfinished is removed.

        Raises:
            ValueError: if the target exists on this host and is not a checkpoint.
            OSError: if the file system fails.
        """
        self._plan = plan
        if self._first:
            check_replaceable(self.directory)
            sealed = [path for path in all_beside(self.directory, "tmp") if (path / MANIFEST_NAME).exists()]
            remove_leftovers_of(self.directory, RECEIPTS_NAME, keep={self.temporary, *sealed})
            remove_leftovers(self.directory.parent, RECEIPTS_NAME)
            make_signed(self.temporary / RECEIPTS_NAME, exist_ok=True)
        (self.temporary / self.folder).mkdir(parents=True, exist_ok=True)

    def commit(
        self, manifest: Manifest, extra_files: Mapping[str, bytes] | None = None, *, update_latest: bool = True
    ) -> None:
        """Makes the checkpoint durable and visible on all hosts, while the other ranks `follow`.

        Raises:
            ValueError: see `CheckpointWriter.commit`.
            OSError: if this host's file system fails. The targets are then as they were, on all hosts.
            FailedElsewhereError: if another host fails. If it did so after all had agreed, the checkpoint is complete
                on all hosts, but not renamed on that one; loading says so and takes it.
        """
        if self.rank != 0:
            return
        described, small = self._described(manifest, extra_files or {})
        text = described.to_json()
        self._board.send("described", _packed(text, small, update_latest))
        self._seal(text, small)
        self._board.post("sealed")
        self._board.wait("sealed")
        self._rename()
        self._board.post("decided")
        self._board.post("renamed")
        self._board.wait("renamed")
        self._point(update_latest)

    def follow(self) -> None:
        """This host's part of the commit.

        Raises:
            OSError: if this host's file system fails.
            FailedElsewhereError: if rank 0 or another host fails; nothing was renamed here, or all of it.
        """
        if self.rank == 0:
            return
        try:
            text, small, update_latest = _unpacked(self._board.receive("described", 0))
            self._seal(text, small)
            self._board.post("sealed")
            self._board.wait("decided", 0)
        except Exception:
            if not self._board.posted("decided", 0):
                if self._is_off():
                    self.abandon()
                raise
        self._rename()
        self._board.post("renamed")
        self._board.wait("renamed")
        self._point(update_latest)

    def is_committed(self) -> bool:
        """True if this host's directory is what this save wrote."""
        try:
            return Manifest.read(self.directory).save == self._token
        except (OSError, ValueError):
            return False

    def abandon(self) -> None:
        """Removes what was written on this host, by this rank if others lead; the targets are not touched."""
        self._plan = None
        if self._first:
            remove(self.temporary)
        else:
            remove(self.temporary / rank_path(self.folder, self.rank))

    def _put(self, path: str, content: bytes) -> None:
        target = self.temporary / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)

    @contextmanager
    def _sink(
        self,
        layout: FileLayout,
        threads: int,
        bytes_per_second: float | None,
        wrote: Callable[[int], object] | None,
    ) -> Iterator[Sink]:
        check_free_space(self.temporary, layout.size)
        create_file(self.temporary / layout.path, layout.header, layout.size)
        disk = DiskWriter(self.temporary, threads=threads, bytes_per_second=bytes_per_second, wrote=wrote)
        try:
            yield _DiskSink(disk, self.temporary, layout.path)
        finally:
            disk.close()

    def _seal(self, manifest: bytes, small: Mapping[str, bytes]) -> None:
        """On the leader: all of this host on its disk, the manifest last."""
        if not self._first:
            return
        for path, content in small.items():
            self._put(small_path(self.folder, path), content)
        remove(self.temporary / RECEIPTS_NAME)
        for directory, _, _ in os.walk(self.temporary):
            sync(Path(directory))
        write_file(self.temporary / MANIFEST_NAME, manifest)
        sync(self.temporary)

    def _is_off(self) -> bool:
        """True if it is certain that rank 0 has not decided to rename and never will: a rank failed before that."""
        ranks = range(self.world_size)
        failed = [rank for rank in ranks if rank == self.rank or self._board.posted("failed", rank)]
        return any(rank == 0 or not self._board.posted("sealed", rank) for rank in failed)

    def _rename(self) -> None:
        if not self._first:
            return
        replace_directory(self.temporary, self.directory, self._shadow)
        for suffix in ("old", "tmp"):
            for stale in all_beside(self.directory, suffix):
                remove(stale)

    def _point(self, update_latest: bool) -> None:
        if self._first and update_latest:
            replace_file(self.directory.parent / LATEST_NAME, f"{self.directory.name}\n".encode())


class _DiskSink:
    def __init__(self, disk: DiskWriter, root: Path, path: str) -> None:
        self._disk, self._root, self._path = disk, root, path

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        self._disk.write(self._path, data, offset, seen)

    def finish(self) -> None:
        self._disk.finish()
        sync(self._root / self._path)  # a file without slices, too


def _packed(manifest: bytes, small: Mapping[str, bytes], update_latest: bool) -> bytes:
    content = {
        "manifest": manifest.decode(),
        "small": {path: base64.b64encode(content).decode() for path, content in small.items()},
        "latest": update_latest,
    }
    return json.dumps(content).encode()


def _unpacked(message: bytes) -> tuple[bytes, dict[str, bytes], bool]:
    content = json.loads(message)
    small = {path: base64.b64decode(text) for path, text in content["small"].items()}
    return content["manifest"].encode(), small, content["latest"]

_MESSAGE_BYTES = 32 << 20
"""Of slices that travel together."""
_Slice = tuple[str, FileKind, Slice]


def check_one_save(engine: TrainState, reader: StateReader) -> None:
    """Check that, and give readers the small files that are on other hosts only; all ranks call it.

    Raises:
        ValueError: On all ranks, if hosts have checkpoints of different saves under one name; says which rank has
            which, and where one lies that all hosts have.
    """
    own = reader.manifest.save if reader.has_manifest else ""
    beside = _complete_beside(reader) if isinstance(reader, PieceReader) else {}
    of_pieces: list[bool] = engine.mesh.world_group.control.all_gather_objects(isinstance(reader, PieceReader))
    if not any(of_pieces):
        return
    everyone: list[tuple[str, str, dict[str, str]]] = engine.mesh.world_group.control.all_gather_objects(
        (own, str(reader.directory), beside)
    )
    saves = [save for save, _, _ in everyone]
    if len(set(saves)) == 1 and all(of_pieces):
        if _may_differ(engine, reader):
            assert isinstance(reader, PieceReader)
            _supply_small(engine, reader)
        return
    lines = [f"\n  rank {rank}: {place} is of save {save!r}" for rank, (save, place, _) in enumerate(everyone)]
    for save in sorted(set(saves)):
        if all(save == there or save in beside for there, _, beside in everyone):
            lines.append(f"\nSave {save!r} is complete on all hosts. Give it its name, and load again:")
            moves = {f"\n  rank {r}: mv {b[save]} {p}" for r, (there, p, b) in enumerate(everyone) if there != save}
            lines += sorted(moves)
    raise ValueError("the ranks would load checkpoints of different saves:" + "".join(lines))


@contextmanager
def supplied(engine: TrainState, reader: StateReader, wanted: Sequence[Wanted]) -> Iterator[None]:
    """Inside, a reader has the slices that its host lacks and another one has; all ranks call it, with what they want.

    Raises:
        RuntimeError: On all ranks, if one cannot read what others need; says which and why.
    """
    if not _may_differ(engine, reader):
        yield
        return
    assert isinstance(reader, PieceReader)
    missing = set(reader.lacking())
    lacks: dict[_Slice, int] = {}
    for item in wanted if missing else ():
        size = reader.spec(item.name, item.kind).dtype.itemsize
        for one in reader.slices_of(item.name, item.kind, item.start, item.stop):
            if one.rank in missing:
                lacks[item.name, item.kind, one] = (one.stop - one.start) * size
    everyone: list[tuple[dict[_Slice, int], set[int]]] = engine.mesh.world_group.control.all_gather_objects(
        (lacks, missing)
    )
    needed: dict[_Slice, int] = {}
    for slices, _ in everyone:
        needed |= slices
    givers = {writer: _first_without(writer, [absent for _, absent in everyone]) for writer in _writers(reader)}
    try:
        for batch in _batches(needed):
            mine = [entry for entry in batch if givers[entry[2].rank] == engine.mesh.world_group.rank]
            for entry, values in _exchange(engine, lambda mine=mine: [(e, _read(reader, e)) for e in mine]):  # type: ignore[misc]
                if entry in lacks:
                    reader.supply(entry[0], entry[1], entry[2], values)
        yield
    finally:
        reader.forget_supplied()


def _supply_small(engine: TrainState, reader: PieceReader) -> None:
    """Random states and the like: each rank's own is on its own host."""
    missing = set(reader.lacking_small())
    everyone: list[set[str]] = engine.mesh.world_group.control.all_gather_objects(missing)
    needed = sorted(set().union(*everyone))
    mine = [path for path in needed if _first_without(path, everyone) == engine.mesh.world_group.rank]
    if needed:
        for name, content in _exchange(engine, lambda: [(path, reader.extra(path)) for path in mine]):
            if name in missing:
                reader.supply_small(name, content)


def _complete_beside(reader: PieceReader) -> dict[str, str]:
    """Save -> place of what a save left complete without its name."""
    found: dict[str, str] = {}
    if isinstance(reader.directory, Path):
        for path in all_beside(reader.directory, "tmp"):
            try:
                found[Manifest.load(path).save] = str(path)
            except (OSError, ValueError):
                continue
    return found


def _may_differ(engine: TrainState, reader: StateReader) -> bool:
    """True if other ranks may see other pieces than this one; all ranks say the same, see `check_one_save`."""
    return (
        isinstance(reader, PieceReader)
        and isinstance(reader.directory, Path)
        and engine.mesh.world_group.world_size > 1
    )


def _writers(reader: PieceReader) -> list[int]:
    pieces = reader.manifest.pieces
    assert pieces is not None
    return list(pieces.ranks)


def _first_without(item: Any, missing: Sequence[set[Any]]) -> int | None:
    """The first rank that does not miss something."""
    return next((rank for rank, items in enumerate(missing) if item not in items), None)


def _batches(needed: Mapping[_Slice, int]) -> Iterator[list[_Slice]]:
    """In an order that is the same on all ranks."""
    batch: list[_Slice] = []
    size = 0
    for entry, nbytes in sorted(needed.items(), key=lambda item: (str(item[0][1]), item[0][0], item[0][2].start)):
        if batch and size + nbytes > _MESSAGE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += nbytes
    if batch:
        yield batch


def _read(reader: PieceReader, entry: _Slice) -> torch.Tensor:
    name, kind, one = entry
    return reader.read(name, one.start, one.stop, kind=kind)


def _exchange(engine: TrainState, read: Callable[[], list[tuple[Any, Any]]]) -> Iterator[tuple[Any, Any]]:
    """Contents of a file, on all ranks."""
    mine: list[tuple[Any, Any]] = []
    error: str | None = None
    try:
        mine = read()
    except (OSError, ValueError) as caught:
        error = str(caught)
    everyone = engine.mesh.world_group.control.all_gather_objects((mine, error))
    if errors := {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}:
        raise RuntimeError(f"pieces that other ranks need cannot be read, on rank(s): {errors}")
    for found, _ in everyone:
        yield from found
