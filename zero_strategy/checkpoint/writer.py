"""Writes a checkpoint: all ranks into the same files, in place, with no communication.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from zero_strategy.checkpoint.checksums import Block, Checksums, blocks_of, checksum_of
from zero_strategy.checkpoint.coverage import Coverage
from zero_strategy.checkpoint.exact_json import parse_object
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest, is_inner_path
from zero_strategy.checkpoint.plan import CheckpointPlan, FileKind
from zero_strategy.checkpoint.replace import (
    all_beside,
    beside,
    remove,
    replace_directory,
    replace_file,
    sync,
    write_file,
)
from zero_strategy.checkpoint.transfer import Transfer

LATEST_NAME = "latest"
RECEIPTS_NAME = ".written"
"""Directory of the ranks' records of what they wrote; marks a checkpoint that is still being written."""


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


class CheckpointWriter:
    """One rank's part in saving one checkpoint.

    Args:
        directory: where the checkpoint will be; its parent is on a file system that all ranks share.
        rank: this rank.
        world_size: number of ranks.
        token: part of the temporary directory's name, equal on all ranks, and best different for every
            run, so that a rank left over from a crashed run cannot write into this one's files.
        chunk_bytes: most bytes moved at once, and the host memory used for tensors on other devices.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        token: str = "save",
        chunk_bytes: int = 32 << 20,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within a world of {world_size}")
        self.directory = Path(os.path.abspath(directory))
        self.temporary = beside(self.directory, token, "tmp")
        self._aside = beside(self.directory, token, "old")
        self._rank = rank
        self._world_size = world_size
        self._transfer = Transfer(chunk_bytes)
        self._coverage = Coverage()
        self._checksums = Checksums()
        self._plan: CheckpointPlan | None = None

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
        if self._rank != 0:
            return
        _check_replaceable(self.directory)
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        for stale in all_beside(self.directory, "tmp"):
            remove(stale)
        _check_free_space(self.directory.parent, plan.total_bytes)
        (self.temporary / RECEIPTS_NAME).mkdir(parents=True)
        for layout in plan.layouts:
            path = self.temporary / layout.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.write(layout.header)
                file.truncate(layout.size)
        for name, content in plan.generated.items():
            (self.temporary / name).write_bytes(content)

    def write(self, kind: FileKind, pieces: Iterable[Piece]) -> None:
        """Writes this rank's pieces in place and flushes them, after rank 0's `prepare`.

        Any number of calls; one per kind is best, for each waits for the disk.

        Args:
            kind: "model", or (optimizer, state kind).
            pieces: consumed one by one. Together with those of all other calls and ranks they must cover
                every element once.

        Raises:
            ValueError: naming the tensor, if it is unknown or the range is outside it or already written.
            TypeError: naming the tensor, if the data has another dtype or is not flat and contiguous.
            OSError: if the file system fails. After any error the checkpoint can only be abandoned.
        """
        plan = self._prepared_plan()
        descriptors: dict[str, int] = {}
        try:
            for piece in pieces:
                layout = plan.layout_of(kind, piece.name)
                _check_piece(layout, piece)
                if layout.path not in descriptors:
                    descriptors[layout.path] = os.open(self.temporary / layout.path, os.O_WRONLY)
                self._write_piece(descriptors[layout.path], layout, piece)
            for fd in descriptors.values():
                os.fsync(fd)  # not left to rank 0: only this host can flush what it has cached
        finally:
            for fd in descriptors.values():
                os.close(fd)
        receipt = {"coverage": self._coverage.to_json(), "checksums": self._checksums.to_json()}
        (self.temporary / self._receipt(self._rank)).write_text(json.dumps(receipt))

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
        if self._rank != 0:
            return
        plan = self._prepared_plan()
        extra_files = extra_files or {}
        _check_extra_files(plan, extra_files)
        _check_manifest(plan, manifest)
        checksums = self._gathered(plan)
        checksums.files |= {layout.path: checksum_of(layout.header) for layout in plan.layouts}
        checksums.files |= {path: checksum_of(data) for path, data in {**plan.generated, **extra_files}.items()}
        sizes = plan.sizes() | {path: len(data) for path, data in extra_files.items()}
        text = replace(manifest, files=sizes, checksums=checksums).to_json()
        for name, content in extra_files.items():
            path = self.temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._seal([*plan.sizes(), *extra_files], text)
        replace_directory(self.temporary, self.directory, self._aside)
        for stale in all_beside(self.directory, "old"):
            remove(stale)
        if update_latest:
            replace_file(self.directory.parent / LATEST_NAME, f"{self.directory.name}\n".encode())

    def abandon(self) -> None:
        """Removes what was written; the target is not touched. After `commit` it does nothing."""
        remove(self.temporary)
        self._plan = None

    def _prepared_plan(self) -> CheckpointPlan:
        if self._plan is None:
            raise RuntimeError(f"{self.directory}: prepare(plan) must come before write and commit")
        return self._plan

    def _write_piece(self, fd: int, layout: FileLayout, piece: Piece) -> None:
        stop = piece.start + piece.data.numel()
        self._coverage.check_free(layout.path, piece.name, piece.start, stop)
        try:
            for begin, end in blocks_of(piece.start, stop, piece.data.element_size()):
                offset, _ = layout.span(piece.name, begin, end)
                checksum = xxhash.xxh3_64()
                part = piece.data[begin - piece.start : end - piece.start]
                self._transfer.write(fd, part, offset, checksum.update)
                self._checksums.add(layout.path, piece.name, Block(begin, end, checksum.hexdigest()))
        except OSError as error:
            message = f"{error.strerror or error} (tensor {piece.name!r})"
            raise OSError(error.errno, message, str(self.temporary / layout.path)) from error
        self._coverage.add(layout.path, piece.name, piece.start, stop)

    def _receipt(self, rank: int) -> str:
        return f"{RECEIPTS_NAME}/rank-{rank:05d}.json"

    def _gathered(self, plan: CheckpointPlan) -> Checksums:
        """All ranks' checksums, once it is certain that the ranks wrote every element."""
        total, checksums = Coverage(), Checksums()
        for rank in range(self._world_size):
            path = self.temporary / self._receipt(rank)
            # Opened by name, not found by listing: network file systems cache listings for long.
            try:
                receipt = parse_object(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue  # a rank that owns nothing; if it did, its elements are missed below
            total.merge_json(receipt["coverage"])
            checksums.merge(Checksums.from_json(receipt["checksums"]))
        total.check_complete(plan.layouts)
        checksums.sort()
        return checksums

    def _seal(self, files: Iterable[str], manifest: bytes) -> None:
        """Flushes all files, then the manifest, then the directories."""
        directories = {self.temporary}
        for name in files:
            path = self.temporary / name
            sync(path)
            inner = list(path.relative_to(self.temporary).parents)[:-1]
            directories.update(self.temporary / parent for parent in inner)
        remove(self.temporary / RECEIPTS_NAME)
        for directory in directories:
            sync(directory)
        write_file(self.temporary / MANIFEST_NAME, manifest)
        sync(self.temporary)


def _check_piece(layout: FileLayout, piece: Piece) -> None:
    data, spec = piece.data, layout.specs[piece.name]
    if data.dtype != spec.dtype:
        raise TypeError(f"piece of tensor {piece.name!r} has dtype {data.dtype}, the file has {spec.dtype}")
    if data.dim() != 1 or not data.is_contiguous() or data.is_conj() or data.is_neg():
        raise TypeError(f"piece of tensor {piece.name!r} must be 1-D and contiguous, got {tuple(data.shape)}")
    if data.device.type == "meta":
        raise TypeError(f"piece of tensor {piece.name!r} is on the meta device and has no data")
    layout.span(piece.name, piece.start, piece.start + data.numel())


def _check_replaceable(target: Path) -> None:
    # Replacing removes the old directory with all that is in it, so it must be one of ours.
    if not os.path.lexists(target) or (target / MANIFEST_NAME).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ValueError(f"{target} exists and is not a checkpoint; it will not be overwritten")


def _check_free_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the checkpoint takes {needed} bytes, {free} are free", str(parent))


def _check_extra_files(plan: CheckpointPlan, extra_files: Mapping[str, bytes]) -> None:
    taken = plan.sizes().keys() | {MANIFEST_NAME}
    for path in extra_files:
        if not is_inner_path(path) or path.startswith(RECEIPTS_NAME) or path in taken:
            raise ValueError(f"extra file {path!r}: not a free relative path inside the checkpoint")


def _check_manifest(plan: CheckpointPlan, manifest: Manifest) -> None:
    owners = {optimizer for optimizer, _ in plan.states}
    same = dict(manifest.weights) == plan.weight_records() and dict(manifest.aliases) == dict(plan.aliases)
    same = same and owners <= manifest.optimizers.keys()
    if not same or any(dict(e.states) != plan.state_paths(n) for n, e in manifest.optimizers.items()):
        raise ValueError("the manifest does not describe the plan; make it with plan.manifest(...)")
