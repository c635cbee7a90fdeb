"""Writes pieces into directories that hosts do not share: a checkpoint directory of the same name on each of them.

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
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zero_strategy.checkpoint.disk import DiskWriter, create_file
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.leftovers import remove_leftovers, remove_leftovers_of, sign
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, RECEIPTS_NAME, Manifest
from zero_strategy.checkpoint.piece_writer import Board, PieceWriter, Sink
from zero_strategy.checkpoint.pieces import rank_path, small_path
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.replace import (
    all_beside,
    beside,
    remove,
    replace_directory,
    replace_file,
    sync,
    write_file,
)
from zero_strategy.checkpoint.save_writer import check_free_space, check_replaceable
from zero_strategy.runtime.transfer import Seen


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
        self._aside = beside(self.directory, token, "old")
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
            (self.temporary / RECEIPTS_NAME).mkdir(parents=True, exist_ok=True)
            sign(self.temporary / RECEIPTS_NAME)
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
        """Whether this host's directory is what this save wrote."""
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
        """Whether it is certain that rank 0 has not decided to rename and never will: a rank failed before that."""
        ranks = range(self.world_size)
        failed = [rank for rank in ranks if rank == self.rank or self._board.posted("failed", rank)]
        return any(rank == 0 or not self._board.posted("sealed", rank) for rank in failed)

    def _rename(self) -> None:
        if not self._first:
            return
        replace_directory(self.temporary, self.directory, self._aside)
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
