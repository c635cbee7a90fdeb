"""Writes a checkpoint as one file of slices per rank, where ranks cannot write into the same files.

    every rank    prepare   write_files   write_all -- report
    rank 0                                             commit: add all reports up, make the manifest known, publish
    others                                             follow: what publishing takes on their side

What the ranks tell each other goes over the board; nothing is read from another rank's directory.

On hosts that share no directory, each has a checkpoint directory of the same name:

    rank 0                                                     leader of each other host       other ranks
    gather reports; send "described": manifest, small files
    seal: small files, manifest, fsync -- "sealed"             seal -- "sealed"                "sealed"
    wait for all
    rename -- "decided"                                        wait; rename -- "renamed"       "renamed"
    wait for all "renamed", then `latest`                      wait, then `latest`
    later: remove what was replaced                            the same

Before "decided" nothing is renamed anywhere; from then on every host has the new checkpoint complete, under its name or
still in `.T.<token>.tmp`. A host that dies between the two leaves hosts with different checkpoints under one name.
Loading sees that by the manifests' `save` and takes the one that is complete on all hosts; so a sealed temporary
directory is removed only after a later save has been renamed. One of another checkpoint goes then, too, if rank 0 finds
its own part of it still sealed (`folders.undecided`): no host has renamed it.
"""

from __future__ import annotations

import base64
import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zero_strategy.checkpoint.disk import (
    DiskWriter,
    WriteOptions,
    all_beside,
    beside,
    create_file,
    remove,
    replace_directory,
    replace_file,
    sync,
    write_file,
)
from zero_strategy.checkpoint.folders import (
    leave_mark,
    make_signed,
    mark_name,
    release_marks,
    remove_leftovers,
    remove_leftovers_of,
    undecided,
)
from zero_strategy.checkpoint.layout import FileLayout, TensorSpec
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, RECEIPTS_NAME, Manifest
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.ranges import (
    Checksums,
    Coverage,
    PieceTable,
    Slice,
    folder_of,
    ranges_to_json,
    rank_path,
    slice_name,
    slices_from_json,
    small_path,
)
from zero_strategy.checkpoint.writer import (
    AnyPiece,
    Entry,
    Piece,
    SaveWriter,
    check_free_of,
    check_free_space,
    check_piece,
    check_replaceable,
    naming_latest,
)
from zero_strategy.runtime.host_bytes import Seen, checksum_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Board(Protocol):
    """Messages between ranks; `comm.store.SaveBoard` is one."""

    def post(self, phase: str) -> None:
        """This rank has finished a phase."""

    def wait(self, phase: str, rank: int | None = None, *, before: str | None = None) -> None:
        """Returns when a rank, or every rank if None, has finished a phase; see `SaveBoard.wait`."""

    def posted(self, phase: str, rank: int) -> bool:
        """True if a rank has finished a phase."""

    def send(self, name: str, content: bytes) -> None:
        """Leave a message."""

    def receive(self, name: str, rank: int) -> bytes:
        """Wait for a message of another rank."""


class Sink(Protocol):
    """An open file of a rank's slices."""

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        """Writes a flat tensor at a byte offset, each call where the one before it ended."""

    def finish(self) -> None:
        """Returns when all bytes are safe."""


class PieceWriter(SaveWriter):
    """Common base of piece writers.

    Args:
        target: the checkpoint, as the user named it.
        rank: this rank.
        world_size: number of ranks.
        token: names this save; equal on all ranks, different for every save.
        board: this rank's.
    """

    def __init__(self, target: str, *, rank: int, world_size: int, token: str, board: Board) -> None:
        self.folder = folder_of(token)
        super().__init__(target, rank=rank, world_size=world_size, token=token)
        self._board = board
        self._slices: dict[str, dict[str, list[Slice]]] = {}
        self._size, self._header = 0, ""

    @abstractmethod
    def _sink(self, layout: FileLayout, options: WriteOptions) -> AbstractContextManager[Sink]:
        """Makes this rank's file, its header included."""

    def write_all(self, pieces: Iterable[Entry], **options: Unpack[WriteOptions]) -> None:
        """Writes all pieces of this rank, one after the other, and tells rank 0; called once, after `write_files`.

        Args:
            pieces: (kind, piece), views of memory. Together with those of all other ranks they must cover every
                element once.
            options: see `WriteOptions`.

        Raises:
            ValueError: naming the tensor, if it is unknown or the range is outside it or given twice.
            TypeError: naming the tensor, if the data has another dtype or is not flat and contiguous.
            OSError: if the file system fails.
        """
        layout, placed = rank_layout(self._prepared_plan(), rank_path(self.folder, self.rank), pieces)
        covered = Coverage()
        with self._sink(layout, options) as sink:
            for logical, piece, offset in placed:
                # Here as well as on rank 0: this rank's own mistake is named before its bytes are written.
                covered.add(logical.path, piece.name, piece.start, piece.start + piece.numel)
                self._write_piece(sink, logical, piece.loaded(), offset)
            sink.finish()
        self._size, self._header = layout.size, checksum_of(layout.header)
        # Only now, since a report says that the bytes are safe.
        if self.rank != 0:
            self._board.send("reported", self._report().to_json())

    def _write_piece(self, sink: Sink, logical: FileLayout, piece: Piece, offset: int) -> None:
        slices = self._slices.setdefault(logical.path, {}).setdefault(piece.name, [])
        slices.append(Slice(piece.start, piece.start + piece.numel, self.rank, offset))
        for begin, part, seen in self._in_blocks(logical.path, piece):
            sink.write(part, offset + (begin - piece.start) * part.element_size(), seen)

    def _report(self) -> _Report:
        return _Report(self._size, self._header, self._slices, self._checksums, self._own_files)

    def _described(self, manifest: Manifest, extra_files: Mapping[str, bytes]) -> tuple[Manifest, dict[str, bytes]]:
        """On rank 0: the manifest of what all ranks wrote, and the small files that every host gets.

        Raises:
            ValueError: if elements were written by no rank or by two, or a small file's path is not free.
            FailedElsewhereError: if a rank does not report.
        """
        plan = self._prepared_plan()
        plan.check_extra_files(extra_files)
        plan.check_manifest(manifest)
        table = PieceTable(self.folder, layouts={layout.path: layout for layout in plan.layouts})
        checksums, files, coverage = Checksums(), dict[str, int](), Coverage()
        # In the order of the ranks: the manifest is the same whoever is first.
        for rank in range(self.world_size):
            report = self._report() if rank == 0 else _Report.from_json(self._board.receive("reported", rank))
            check_free_of(files, report.files)
            files |= report.files
            checksums.merge(report.checksums)
            for path, tensors in report.slices.items():
                for name, parts in tensors.items():
                    for part in parts:
                        coverage.add(path, name, part.start, part.stop)
                    table.slices.setdefault(path, {}).setdefault(name, []).extend(parts)
            table.ranks[rank] = (report.size, report.header)
            table.owners |= dict.fromkeys(report.files, rank)
        coverage.check_complete(plan.layouts)
        # Readers look for elements by bisection.
        for tensors in table.slices.values():
            for parts in tensors.values():
                parts.sort(key=lambda part: part.start)
        everywhere = {**plan.generated, **extra_files}
        table.owners |= dict.fromkeys(everywhere)
        return replace(self._completed(manifest, checksums, files, extra_files), pieces=table), everywhere


@dataclass
class _Report:
    """Files that a rank wrote."""

    size: int
    header: str
    slices: dict[str, dict[str, list[Slice]]]
    checksums: Checksums
    files: dict[str, int]

    def to_json(self) -> bytes:
        content = {**vars(self), "slices": ranges_to_json(self.slices), "checksums": self.checksums.to_json()}
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, text: bytes) -> _Report:
        content: dict[str, Any] = json.loads(text)
        slices, checksums = slices_from_json(content["slices"]), Checksums.from_json(content["checksums"])
        return cls(content["size"], content["header"], slices, checksums, content["files"])


def rank_layout(
    plan: CheckpointPlan, path: str, pieces: Iterable[Entry]
) -> tuple[FileLayout, list[tuple[FileLayout, AnyPiece, int]]]:
    """Lays out the file of a rank's slices.

    Args:
        plan: The logical files.
        path: The file's own path.
        pieces: Views of memory, in the order in which they shall lie; wider dtypes come first all the same.

    Returns:
        The file's layout; and (logical file, piece, byte offset in the rank's file) in the order of the offsets.

    Raises:
        ValueError, TypeError: Naming the tensor, if a piece does not fit the plan or is there twice.
    """
    found: dict[str, tuple[FileLayout, AnyPiece]] = {}
    for kind, piece in pieces:
        logical = plan.layout_of(kind, piece.name)
        check_piece(logical, piece)
        # Ranges without elements may share a name, and have nothing to write.
        if piece.numel:
            stop = piece.start + piece.numel
            name = slice_name(logical.path, piece.name, piece.start, stop)
            if name in found:
                raise ValueError(f"elements [{piece.start}, {stop}) of tensor {piece.name!r} are given twice")
            found[name] = logical, piece
    specs = [TensorSpec(name, piece.dtype, (piece.numel,)) for name, (_, piece) in found.items()]
    layout = FileLayout.compute(path, specs)
    return layout, [(*found[name], offset) for name, offset in layout.offsets.items()]


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
        super().__init__(os.fspath(directory), rank=rank, world_size=world_size, token=token, board=board)
        self.directory = Path(os.path.abspath(directory))
        self.temporary = beside(self.directory, token, "tmp")
        self._shadow = beside(self.directory, token, "old")
        self._mark = self.directory.parent / mark_name(token, rank)
        self._stale: list[Path] = []
        self._undecided: list[str] = []
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
            # Sealed ones stay until this save is renamed: one may be all that a host has of a save that others show.
            sealed = [path for path in all_beside(self.directory, "tmp") if (path / MANIFEST_NAME).exists()]
            remove_leftovers_of(self.directory, RECEIPTS_NAME, keep={self.temporary, *sealed})
            remove_leftovers(self.directory.parent, RECEIPTS_NAME)
            # Other ranks of this host may have made the directory already.
            make_signed(self.temporary / RECEIPTS_NAME, exist_ok=True)
        for again in (True, False):
            try:
                (self.temporary / self.folder).mkdir(parents=True, exist_ok=True)
                break
            except FileNotFoundError:  # the leader has just removed the empty directory as a leftover; it does so once
                if not again:
                    raise

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
        # Before this host seals: the others do so at the same time.
        self._undecided = [path.name for path in undecided(self.directory.parent)]
        self._board.send("described", packed(text, small, update_latest, self._undecided))
        self._seal(text, small)
        self._board.post("sealed")
        # Before the first rename: from here on the new checkpoint is whole on every host, whoever dies.
        self._board.wait("sealed")
        # Before the word is given: where this fails, no other host has renamed anything.
        self._rename()
        self._board.post("decided")
        self._board.post("renamed")
        # On all hosts, before any of them names it the latest.
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
            text, small, update_latest, self._undecided = unpacked(self._board.receive("described", 0))
            self._seal(text, small)
            self._board.post("sealed")
            self._board.wait("decided", 0, before="sealed")
        except Exception:
            # The word may have come all the same: then the others rename, and so does this host.
            if not self._board.posted("decided", 0):
                # In doubt it stays: if rank 0 decides after all, this is the host's only copy.
                if self._is_off():
                    self.abandon()
                raise
        self._rename()
        self._board.post("renamed")
        self._board.wait("renamed")
        self._point(update_latest)

    def clean_up(self) -> None:
        """Removes what this host's checkpoint was before, and what earlier saves have left sealed."""
        for path in self._stale:
            remove(path)
            release_marks(path)
        if self._first:
            release_marks(self.temporary)

    def abandon(self) -> None:
        """Removes what was written on this host, by this rank if others lead; the targets are not touched."""
        self._plan = None
        if not self._first:
            remove(self.temporary / rank_path(self.folder, self.rank))
        elif self.is_committed():
            # Interrupted behind its rename. The directory is now what the checkpoint was before, which may be all that
            # the hosts have in common: without a mark it stays until a later save is there.
            remove(self._mark)
        else:
            remove(self.temporary)
            release_marks(self.temporary)

    def _manifest_there(self) -> Manifest:
        return Manifest.read(self.directory)

    def _put(self, path: str, content: bytes) -> None:
        target = self.temporary / small_path(self.folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)

    @contextmanager
    def _sink(self, layout: FileLayout, options: WriteOptions) -> Iterator[Sink]:
        check_free_space(self.temporary, layout.size)
        create_file(self.temporary / layout.path, layout.header, layout.size)
        disk = DiskWriter(self.temporary, **options)
        try:
            yield _DiskSink(disk, self.temporary, layout.path)
        finally:
            disk.close()

    def _seal(self, manifest: bytes, small: Mapping[str, bytes]) -> None:
        """On the leader: all of this host on its disk, the manifest last."""
        if not self._first:
            return
        # The manifest last, and behind a flush of all directories: it says that everything else is on the disk.
        for path, content in small.items():
            self._put(path, content)
        # A sealed directory has no owner in it: it is no leftover when its process is gone. The mark beside it is for
        # rank 0, which knows what nobody has renamed, and for what the checkpoint is before it is replaced.
        leave_mark(self._mark)
        remove(self.temporary / RECEIPTS_NAME)
        for directory, _, _ in os.walk(self.temporary):
            sync(Path(directory))
        write_file(self.temporary / MANIFEST_NAME, manifest)
        sync(self.temporary)

    def _is_off(self) -> bool:
        """True if it is certain that rank 0 has not decided to rename and never will: a rank failed before that."""
        ranks = range(self.world_size)
        # This rank has failed, or it would not ask.
        failed = [rank for rank in ranks if rank == self.rank or self._board.posted("failed", rank)]
        return any(rank == 0 or not self._board.posted("sealed", rank) for rank in failed)

    def _rename(self) -> None:
        if not self._first:
            return
        old = replace_directory(self.temporary, self.directory, self._shadow, keep_old=True)
        # Until here a sealed one may have been the newest that all hosts had in common. Removed later, since the other
        # hosts wait; listed now, since what comes later is of a later save.
        found = [path for suffix in ("old", "tmp") for path in all_beside(self.directory, suffix)]
        self._stale = [path for path in found if path == old or path not in (self.temporary, self._shadow)]
        self._stale += [self.directory.parent / name for name in self._undecided]

    def _point(self, update_latest: bool) -> None:
        if not self._first:
            return
        if update_latest:
            with naming_latest(self.target):
                replace_file(
                    self.directory.parent / LATEST_NAME, f"{self.directory.name}\n".encode(), token=self._token
                )
        if not self._stale:
            self.clean_up()


class _DiskSink:
    def __init__(self, disk: DiskWriter, root: Path, path: str) -> None:
        self._disk, self._root, self._path = disk, root, path

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        self._disk.write(self._path, data, offset, seen)

    def finish(self) -> None:
        self._disk.finish()
        sync(self._root / self._path)  # a file without slices, too


def packed(manifest: bytes, small: Mapping[str, bytes], update_latest: bool, undecided: list[str]) -> bytes:
    """The message from rank 0 to the first rank of each other host: what it is to write beside its ranks' slices."""
    content = {
        "manifest": manifest.decode(),
        "small": {path: base64.b64encode(content).decode() for path, content in small.items()},
        "latest": update_latest,
        "undecided": undecided,
    }
    return json.dumps(content).encode()


def unpacked(message: bytes) -> tuple[bytes, dict[str, bytes], bool, list[str]]:
    """The arguments of `packed`."""
    content = json.loads(message)
    small = {path: base64.b64decode(text) for path, text in content["small"].items()}
    return content["manifest"].encode(), small, content["latest"], content["undecided"]
