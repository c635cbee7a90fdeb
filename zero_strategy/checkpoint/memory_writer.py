"""Writes a checkpoint of pieces into memory files of each host, over one that is no longer needed.

A folder of a memory file system (/dev/shm) outlives the process that writes it, and goes with the host. Its pages are
used again from one checkpoint to the next: new ones are paid for when they are first written to.

    every rank    the folder's manifest goes: it is no checkpoint any more; then its slices, over those of before
    rank 0        commit: the manifest of what all ranks have written
    each host     the first rank of it writes small files, and the manifest last

Nothing is flushed, and nothing is renamed: a checkpoint that was torn has no manifest, or other checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zero_strategy.checkpoint.disk import WriteOptions, remove
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.piece_writer import Board, PieceWriter, Sink, packed, unpacked
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.ranges import rank_path, small_path
from zero_strategy.runtime.host_bytes import Seen, as_bytes, memory_of

KEPT = ".kept"
"""Beginning of a file's name whose memory somebody keeps for the next copy."""
_CHUNK_BYTES = 1 << 20
"""Copied while it is in the cache, where its checksum has brought it."""


class MemoryPieceWriter(PieceWriter):
    """One rank's part in writing a checkpoint into its host's memory.

    Args:
        directory: Of the checkpoint, on this host.
        rank, world_size, token, board: See `PieceWriter`.
        leader: Whether this rank is the first of its host.
        spare: This process's file of an earlier checkpoint in that directory, whose memory it takes; None: there is
            none.

    Attributes:
        file: This rank's file; the next one's `spare`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        token: str,
        board: Board,
        leader: bool,
        spare: Path | None,
    ) -> None:
        super().__init__(str(directory), rank=rank, world_size=world_size, token=token, board=board)
        self.directory, self._first, self._spare = directory, leader, spare
        self.file = directory / rank_path(self.folder, rank)

    def prepare(self, plan: CheckpointPlan) -> None:
        """Take the manifest of what is there away.

        Raises:
            OSError: If the file system fails.
        """
        self._plan = plan
        # Before the first byte of this host changes, whichever of its ranks writes it.
        (self.directory / MANIFEST_NAME).unlink(missing_ok=True)
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def commit(
        self, manifest: Manifest, extra_files: Mapping[str, bytes] | None = None, *, update_latest: bool = True
    ) -> None:
        """Make the checkpoint known on all hosts, while the other ranks `follow`.

        Raises:
            ValueError: See `CheckpointWriter.commit`.
            OSError: If the file system fails.
        """
        described, small = self._described(manifest, extra_files or {})
        text = described.to_json()
        self._board.send("described", packed(text, small, update_latest, []))
        self._seal(text, small)

    def follow(self) -> None:
        """This host's part of the commit.

        Raises:
            OSError: If the file system fails.
            FailedElsewhereError: If rank 0 fails.
        """
        if self._first:
            text, small, _, _ = unpacked(self._board.receive("described", 0))
            self._seal(text, small)

    def abandon(self) -> None:
        """Nothing: without a manifest it is no checkpoint, and its memory is the next one's."""
        self._plan = None

    def _seal(self, manifest: bytes, small: Mapping[str, bytes]) -> None:
        if not self._first:
            return
        for path, content in small.items():
            self._put(path, content)
        written = self.directory / f"{MANIFEST_NAME}.new"
        written.write_bytes(manifest)
        # At once, and last: it says that everything else is there.
        written.replace(self.directory / MANIFEST_NAME)
        # Now, and not in the background: all ranks have taken their earlier files, and the next copy is not begun. It
        # is what ranks have left who are gone.
        for entry in self.directory.iterdir():
            if entry.name not in (self.folder, MANIFEST_NAME) and not entry.name.startswith(KEPT):
                remove(entry)

    def _manifest_there(self) -> Manifest:
        return Manifest.read(self.directory)

    def _put(self, path: str, content: bytes) -> None:
        target = self.directory / small_path(self.folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    @contextmanager
    def _sink(self, layout: FileLayout, options: WriteOptions) -> Iterator[Sink]:
        if self._spare is not None and self._spare != self.file and self._spare.exists():
            self._spare.replace(self.file)
        fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, layout.size)
            _write_all(fd, memoryview(layout.header), 0)
            yield _MemorySink(fd)
        finally:
            os.close(fd)


def slices_bytes(file: Path) -> int:
    """Bytes of the slices in a rank's file, its header left out; 0 if it is not there: its copy was given up."""
    try:
        with file.open("rb") as opened:
            return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
    except FileNotFoundError:
        return 0


class _MemorySink:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        content = as_bytes(data)
        for begin in range(0, content.numel(), _CHUNK_BYTES):
            part = content[begin : begin + _CHUNK_BYTES].cpu()
            memory = memory_of(part)
            seen(memory)
            _write_all(self._fd, memory, offset + begin)

    def finish(self) -> None:
        """Nothing: memory has no flush."""


def _write_all(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)
