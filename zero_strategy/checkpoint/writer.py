"""The writer: all ranks into the same files, in place, without communication; and what all writers share.

All ranks write into the same files, in place, without communication.

    rank 0               every rank          rank 0
    prepare(plan)   |    write(kind, ...)  |   commit(manifest)
                 barrier  write(kind, ...)  barrier

The caller puts the barriers, and calls `abandon` where a phase failed. Until `commit` renames the temporary
directory, the target is untouched; a crash leaves the checkpoint that was there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from zero_strategy.checkpoint.disk import (
    DiskWriter,
    WriteOptions,
    all_beside,
    beside,
    create_file,
    naming,
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
)
from zero_strategy.checkpoint.layout import FileLayout, parse_object
from zero_strategy.checkpoint.manifest import FORMAT, LATEST_NAME, MANIFEST_NAME, RECEIPTS_NAME, FileKind, Manifest
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.ranges import Block, Checksums, Coverage, blocks_of
from zero_strategy.runtime.host_bytes import Seen, checksum_of
from zero_strategy.runtime.regular_files import read_regular

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of a tensor.

    Attributes:
        name: the tensor.
        start: index of the piece's first element in the row-major flattened tensor.
        data: the elements; 1-D, contiguous, of the tensor's dtype, on any device.
    """

    name: str
    start: int
    data: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self.data.dtype

    def loaded(self) -> Piece:
        """Itself: its elements are in memory."""
        return self


@dataclass(frozen=True, eq=False)
class LatePiece:
    """A range of a tensor that is read when its turn to be written comes.

    Attributes:
        name: the tensor.
        start: index of the piece's first element in the row-major flattened tensor.
        numel: its elements.
        dtype: their dtype.
        load: gives them, 1-D and contiguous.
    """

    name: str
    start: int
    numel: int
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    def loaded(self) -> Piece:
        """A copy with its elements in memory."""
        return Piece(self.name, self.start, self.load())


AnyPiece = Piece | LatePiece
Entry = tuple[FileKind, AnyPiece]
"""A piece, and which files it goes into."""


def in_file_order(plan: CheckpointPlan, pieces: Iterable[Entry]) -> list[Entry]:
    """Pieces in the order of their bytes in the files of `plan`."""
    order = {layout.path: number for number, layout in enumerate(plan.layouts)}

    def place(item: Entry) -> tuple[int, int]:
        kind, piece = item
        layout = plan.layout_of(kind, piece.name)
        return order[layout.path], layout.offsets[piece.name] + piece.start * piece.dtype.itemsize

    return sorted(pieces, key=place)


class SaveWriter(ABC):
    """One rank's part in saving one checkpoint; `save_job.SaveJob` says in which order the ranks call it.

    Attributes:
        target: The checkpoint, as the user named it.
        leads: Whether this rank, not being rank 0, is the first one of a host with a directory of its own.
    """

    leads = False

    def __init__(self, target: str, *, rank: int, world_size: int, token: str) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within a world of {world_size}")
        self.rank, self.world_size = rank, world_size
        self.target, self._token = target, token
        self._plan: CheckpointPlan | None = None
        self._checksums = Checksums()
        self._own_files: dict[str, int] = {}

    @abstractmethod
    def prepare(self, plan: CheckpointPlan) -> None:
        """Before the first byte; every rank calls it, with the same plan."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes small files of this rank's own, such as its random state, under paths that no other rank uses.

        Raises:
            ValueError: if a path is not free, or leads out of the checkpoint.
            OSError: if the file system fails.
        """
        # Before any is written, since they become paths.
        self._prepared_plan().check_extra_files(files)
        for path, content in files.items():
            self._put(path, content)
            self._own_files[path] = len(content)
            self._checksums.files[path] = checksum_of(content)

    @abstractmethod
    def write_all(self, pieces: Iterable[Entry], **options: Unpack[WriteOptions]) -> None:
        """Writes this rank's pieces and flushes them."""

    @abstractmethod
    def commit(
        self,
        manifest: Manifest,
        extra_files: Mapping[str, bytes] | None = None,
        *,
        update_latest: bool = True,
    ) -> None:
        """Makes the checkpoint durable and visible; rank 0 calls it, when all ranks have written."""

    def follow(self) -> None:
        """Work of the other ranks while rank 0 is in `commit`."""
        return

    def is_committed(self) -> bool:
        """True if the target is what this writer's group wrote; any rank may ask, while nobody saves to it again."""
        try:
            manifest = self._manifest_there()
        except (OSError, ValueError):
            return False
        return manifest is not None and manifest.save == self._token

    def clean_up(self) -> None:  # noqa: B027 (most have nothing to do)
        """Removes what a commit has replaced, if it has left that for later."""

    @abstractmethod
    def abandon(self) -> None:
        """Removes what was written; the target is not touched. After `commit` it does nothing."""

    @abstractmethod
    def _put(self, path: str, content: bytes) -> None:
        """Writes a small file of this save."""

    @abstractmethod
    def _manifest_there(self) -> Manifest | None:
        """The target's manifest, if there is one."""

    def _prepared_plan(self) -> CheckpointPlan:
        if self._plan is None:
            raise RuntimeError(f"{self.target}: prepare(plan) must come before write and commit")
        return self._plan

    def _in_blocks(self, path: str, piece: Piece) -> Iterator[tuple[int, torch.Tensor, Seen]]:
        """The blocks of a piece: first element, data, and what is to see the bytes; notes the checksum of each."""
        stop = piece.start + piece.numel
        for begin, end in blocks_of(piece.start, stop, piece.data.element_size()):
            checksum = xxhash.xxh3_64()
            yield begin, piece.data[begin - piece.start : end - piece.start], checksum.update
            # Reached when whoever iterates has handed the whole block on.
            self._checksums.add(path, piece.name, Block(begin, end, checksum.hexdigest()))

    def _completed(
        self, manifest: Manifest, checksums: Checksums, own_files: dict[str, int], small: Mapping[str, bytes]
    ) -> Manifest:
        """The manifest with all files: those of all ranks, and `small` ones that are written at the commit."""
        plan = self._prepared_plan()
        check_free_of(own_files, small)
        small = {**plan.generated, **small}
        # Receipts come rank by rank.
        checksums.sort()
        checksums.files |= {layout.path: checksum_of(layout.header) for layout in plan.layouts}
        checksums.files |= {path: checksum_of(content) for path, content in small.items()}
        sizes = plan.sizes() | own_files | {path: len(content) for path, content in small.items()}
        return replace(manifest, files=sizes, checksums=checksums, save=self._token)


def check_piece(layout: FileLayout, piece: AnyPiece) -> None:
    """Raises ValueError or TypeError, naming the tensor, if a piece does not fit into its file."""
    spec = layout.specs[piece.name]
    if piece.dtype != spec.dtype:
        raise TypeError(f"piece of tensor {piece.name!r} has dtype {piece.dtype}, the file has {spec.dtype}")
    if isinstance(piece, Piece):
        _check_data(piece)
    # It raises where the range is not within the tensor.
    layout.span(piece.name, piece.start, piece.start + piece.numel)


def _check_data(piece: Piece) -> None:
    data = piece.data
    if data.dim() != 1 or not data.is_contiguous() or data.is_conj() or data.is_neg():
        raise TypeError(f"piece of tensor {piece.name!r} must be 1-D and contiguous, got {tuple(data.shape)}")
    if data.device.type == "meta":
        raise TypeError(f"piece of tensor {piece.name!r} is on the meta device and has no data")


def check_replaceable(target: Path) -> None:
    """Raises ValueError if the target exists and is not a checkpoint."""
    # Replacing removes the old directory with all that is in it, so it must be one of ours. A file is replaced as any
    # saving call does it: a run that goes on from another strategy's checkpoints meets its `last.ckpt`.
    if not target.is_dir():
        return
    if (target / MANIFEST_NAME).is_file():
        if _is_foreign(target / MANIFEST_NAME):
            raise ValueError(f"{target / MANIFEST_NAME} is of no checkpoint; {target} will not be overwritten")
    elif any(target.iterdir()):
        raise ValueError(f"{target} exists and is not a checkpoint; it will not be overwritten")


def unlisted(target: Path) -> list[Path]:
    """Other people's files in a checkpoint's directory, which replacing the checkpoint would remove as well.

    All files where `manifest.json` is somebody else's; none where it is a damaged one of ours, which tells nothing.
    """
    try:
        listed = {path.partition("/")[0] for path in Manifest.read(target).files} | {MANIFEST_NAME}
    except (OSError, ValueError):
        if not (target / MANIFEST_NAME).is_file() or not _is_foreign(target / MANIFEST_NAME):
            return []
        listed = set()
    return sorted(path for path in target.iterdir() if path.name not in listed)


def _is_foreign(manifest: Path) -> bool:
    """True for a file of that name that others write, such as a web application's; not for a damaged one of ours."""
    return FORMAT.encode() not in read_regular(manifest)


@contextmanager
def naming_latest(target: str) -> Iterator[None]:
    """Inside, `latest` is written. Where that fails a warning says so: it is no failure of the save, which is there."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{target} is saved, but the file {LATEST_NAME} beside it could not be written and may name an earlier "
            f"checkpoint: {error}",
            stacklevel=4,
        )


def check_free_space(parent: Path, needed: int) -> None:
    """Raises OSError (ENOSPC) if the file system has too little room."""
    # A clear message for the usual case; what others take meanwhile is found when space is reserved.
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the checkpoint takes {needed} bytes, {free} are free", str(parent))


def check_free_of(taken: Mapping[str, object], files: Mapping[str, object]) -> None:
    """Raises ValueError if a small file has two writers."""
    if twice := sorted(taken.keys() & files.keys()):
        raise ValueError(f"extra file {twice[0]!r} is written by two ranks, or by a rank and at the commit")


class CheckpointWriter(SaveWriter):
    """One rank's part in saving one checkpoint.

    Args:
        directory: where the checkpoint will be; its parent is on a file system that all ranks share.
        rank: this rank.
        world_size: number of ranks.
        token: part of the temporary directory's name, equal on all ranks, and best different for every
            run, so that a rank left over from a crashed run cannot write into this one's files.
        cleans_later: `commit` does not remove what it replaces; the caller calls `clean_up`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        token: str = "save",
        cleans_later: bool = False,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        super().__init__(os.fspath(directory), rank=rank, world_size=world_size, token=token)
        self.temporary = beside(self.directory, token, "tmp")
        self._shadow = beside(self.directory, token, "old")
        self._mark = self.directory.parent / mark_name(token, rank)
        self._cleans_later = cleans_later
        self._replaced: list[Path] = []
        self._coverage = Coverage()

    def prepare(self, plan: CheckpointPlan) -> None:
        """Creates all files at their full size; every rank calls it, rank 0 acts.

        What earlier saves of this target left behind in a crash is removed.

        Args:
            plan: the same on every rank.

        Raises:
            ValueError: if the target exists and is not a checkpoint.
            OSError: with ENOSPC if the file system has too little free space, or another failure of it.
        """
        self._plan = plan
        if self.rank != 0:
            return
        check_replaceable(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        # Before free space is counted: leftovers may be what fills the disk.
        remove_leftovers_of(self.directory, RECEIPTS_NAME)
        remove_leftovers(self.directory.parent, RECEIPTS_NAME)
        check_free_space(self.directory.parent, plan.total_bytes)
        # Before the first file: what a kill leaves behind without a mark stays for good.
        make_signed(self.temporary / RECEIPTS_NAME)
        for layout in plan.layouts:
            path = self.temporary / layout.path
            path.parent.mkdir(parents=True, exist_ok=True)
            create_file(path, layout.header, layout.size)
        for name, content in plan.generated.items():
            with naming(self.temporary / name):
                (self.temporary / name).write_bytes(content)

    def write(self, kind: FileKind, pieces: Iterable[Piece]) -> None:
        """`write_all` of pieces of one kind."""
        self.write_all((kind, piece) for piece in pieces)

    def write_all(self, pieces: Iterable[Entry], **options: Unpack[WriteOptions]) -> None:
        """Writes this rank's pieces in place and flushes them, after rank 0's `prepare`.

        Any number of calls; one for all is best, for each waits for the disk. In the order of the files' bytes
        (`in_file_order`) pieces are put together into large writes.

        Args:
            pieces: (kind, piece); kind is "model", or (optimizer, state kind). Consumed one by one. Together with
                those of all other calls and ranks they must cover every element once.
            options: see `WriteOptions`.

        Raises:
            ValueError: naming the tensor, if it is unknown or the range is outside it or already written.
            TypeError: naming the tensor, if the data has another dtype or is not flat and contiguous.
            OSError: if the file system fails. After any error the checkpoint can only be abandoned.
        """
        plan = self._prepared_plan()
        disk = DiskWriter(self.temporary, **options)
        try:
            for kind, given in pieces:
                piece = given.loaded()
                layout = plan.layout_of(kind, piece.name)
                check_piece(layout, piece)
                self._write_piece(disk, layout, piece)
            disk.finish()
        except OSError as error:
            raise _named(error, disk.failed_at, plan) from error
        finally:
            disk.close()
        # Last: what it lists is on the disk.
        self._leave_receipt()

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """See `SaveWriter.write_files`."""
        super().write_files(files)
        self._leave_receipt()

    def _leave_receipt(self) -> None:
        receipt = {
            "coverage": self._coverage.to_json(),
            "checksums": self._checksums.to_json(),
            "files": self._own_files,
        }
        path = self.temporary / self._receipt(self.rank)
        with naming(path):
            path.write_text(json.dumps(receipt))

    def commit(
        self,
        manifest: Manifest,
        extra_files: Mapping[str, bytes] | None = None,
        *,
        update_latest: bool = True,
    ) -> None:
        """Makes the checkpoint durable and visible; every rank may call it, rank 0 acts.

        An existing target is replaced, with everything in it.

        Args:
            manifest: made by `plan.manifest(...)`; sizes of the extra files and all checksums are added.
            extra_files: relative path -> content of small further files.
            update_latest: write this checkpoint's name into the file `latest` beside it.

        Raises:
            ValueError: if elements were written by no rank or by two, the manifest belongs to another plan,
                or an extra file's path is not free or leads out of the checkpoint.
            OSError: if the file system fails. The target is then as it was.
        """
        if self.rank != 0:
            return
        plan = self._prepared_plan()
        extra_files = extra_files or {}
        plan.check_extra_files(extra_files)
        plan.check_manifest(manifest)
        # Before the commit's first byte: a hole, or what JSON cannot hold, is an error while nothing has changed.
        described = self._completed(manifest, *self._gathered(plan), extra_files)
        text = described.to_json()
        for name, content in extra_files.items():
            path = self.temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path):
                path.write_bytes(content)
        self._seal(described.files, text)
        # Before the exchange, since what the checkpoint was before has no mark of this process in it.
        leave_mark(self._mark)
        old = replace_directory(self.temporary, self.directory, self._shadow, keep_old=True)
        # Until a checkpoint has the name, one of these may be the only one left. Listed now: one that is there later
        # may be of a later save that is between its two renames.
        stale = [path for path in all_beside(self.directory, "old") if path != self._shadow]
        self._replaced = stale if old is None else [old, *stale]
        # Only under its own name: a save that is killed before the rename is known by the mark in it.
        remove(self.directory / RECEIPTS_NAME)
        # Behind the rename: it never names what is not there.
        if update_latest:
            with naming_latest(self.target):
                replace_file(
                    self.directory.parent / LATEST_NAME, f"{self.directory.name}\n".encode(), token=self._token
                )
        if not self._cleans_later or not self._replaced:
            self.clean_up()

    def clean_up(self) -> None:
        """Removes what had the checkpoint's name before `commit`; rank 0 acts."""
        if self.rank == 0:
            for path in self._replaced:
                remove(path)
            release_marks(self.temporary)

    def abandon(self) -> None:
        """Removes what was written; the target is not touched. After `commit` it does nothing."""
        remove(self.temporary)
        if self.rank == 0:
            release_marks(self.temporary)
        self._plan = None

    def _put(self, path: str, content: bytes) -> None:
        target = self.temporary / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)

    def _manifest_there(self) -> Manifest:
        return Manifest.read(self.directory)

    def _write_piece(self, disk: DiskWriter, layout: FileLayout, piece: Piece) -> None:
        # Before the write: elements that were written are not written over.
        self._coverage.add(layout.path, piece.name, piece.start, piece.start + piece.numel)
        for begin, part, seen in self._in_blocks(layout.path, piece):
            offset, _ = layout.span(piece.name, begin, begin + part.numel())
            disk.write(layout.path, part, offset, seen)

    def _receipt(self, rank: int) -> str:
        return f"{RECEIPTS_NAME}/rank-{rank:05d}.json"

    def _gathered(self, plan: CheckpointPlan) -> tuple[Checksums, dict[str, int]]:
        """All ranks' checksums and own files, once it is certain that the ranks wrote every element."""
        total, checksums = Coverage(), Checksums()
        files: dict[str, int] = {}
        for rank in range(self.world_size):
            path = self.temporary / self._receipt(rank)
            # Opened by name, not found by listing: network file systems cache listings for long.
            try:
                receipt = parse_object(read_regular(path), str(path))
            except FileNotFoundError:
                continue  # a rank that owns nothing; if it did, its elements are missed below
            total.merge_json(receipt["coverage"])
            checksums.merge(Checksums.from_json(receipt["checksums"]))
            check_free_of(files, receipt["files"])
            files |= receipt["files"]
        total.check_complete(plan.layouts)
        return checksums, files

    def _seal(self, files: Iterable[str], manifest: bytes) -> None:
        """Flushes all files, then the manifest, then the directories."""
        directories = {self.temporary}
        # Also what ranks have flushed: headers and generated files were written without it.
        for name in files:
            path = self.temporary / name
            sync(path)
            inner = list(path.relative_to(self.temporary).parents)[:-1]
            directories.update(self.temporary / parent for parent in inner)
        for receipt in (self.temporary / RECEIPTS_NAME).glob("rank-*.json"):
            remove(receipt)  # the name of who writes this stays until the directory has its own
        # Files' names last only once their directories are flushed.
        for directory in directories:
            sync(directory)
        # Behind all that it names: it is the sign that everything is on the disk.
        write_file(self.temporary / MANIFEST_NAME, manifest)
        sync(self.temporary)


def _named(error: OSError, failed_at: tuple[str, int] | None, plan: CheckpointPlan) -> OSError:
    """The error with the tensor that could not be written, the first of several in one write."""
    if failed_at is None:
        return error
    layout = next(layout for layout in plan.layouts if layout.path == failed_at[0])
    name = [name for name, offset in layout.offsets.items() if offset <= failed_at[1]][-1]
    return OSError(error.errno, f"{error.strerror or error} (tensor {name!r})", error.filename)
