"""Writes pieces into an object store, where nothing can be changed in place or renamed.

    every rank    its file under pieces-<token>/, its small files
    rank 0        the other small files, then the manifest: that one PUT is the commit
                  then `latest`, then what the old manifest named is removed

Until the manifest is replaced the old one names the old pieces, which are all there. What a crash leaves behind is
removed by the next save of the same target.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.pace import Pace
from zero_strategy.checkpoint.piece_writer import Board, PieceWriter, Sink
from zero_strategy.checkpoint.pieces import FOLDER_PREFIX, small_path
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.remote import RemoteFolder
from zero_strategy.checkpoint.save_writer import LATEST_NAME
from zero_strategy.runtime.transfer import Seen, as_bytes, memory_of

_CHUNK_BYTES = 8 << 20


class RemotePieceWriter(PieceWriter):
    """One rank's part in saving a checkpoint to a URL.

    Args:
        url: where the checkpoint will be.
        rank, world_size, token, board: see `PieceWriter`.
    """

    def __init__(self, url: str, *, rank: int, world_size: int, token: str, board: Board) -> None:
        super().__init__(rank=rank, world_size=world_size, token=token, board=board)
        self._remote = RemoteFolder(url)
        self._old: Manifest | None = None
        self._sent_manifest = False

    def prepare(self, plan: CheckpointPlan) -> None:
        """Removes what crashed saves of this target left; rank 0 acts.

        Raises:
            ValueError: if there is something at the URL that is not a checkpoint.
            OSError: if the store fails.
        """
        self._plan = plan
        if self.rank != 0:
            return
        names = self._remote.names()
        if MANIFEST_NAME in names:
            with contextlib.suppress(ValueError):  # a damaged one may be replaced, too
                self._old = self._remote.manifest()
        elif foreign := [name for name in names if not name.startswith(FOLDER_PREFIX)]:
            raise ValueError(
                f"{self._remote.url} is not a checkpoint and holds {foreign[:3]}; it will not be overwritten"
            )
        kept = self._old.pieces.folder if self._old is not None and self._old.pieces is not None else None
        for name in names:
            if name.startswith(FOLDER_PREFIX) and name != kept:
                self._remote.remove(name)

    def commit(
        self, manifest: Manifest, extra_files: Mapping[str, bytes] | None = None, *, update_latest: bool = True
    ) -> None:
        """Puts the manifest, and so makes the checkpoint visible; rank 0 acts.

        Raises:
            ValueError: see `CheckpointWriter.commit`.
            OSError: if the store fails; what was there before is there still.
            FailedElsewhereError: if another rank does not report.
        """
        if self.rank != 0:
            return
        described, small = self._described(manifest, extra_files or {})
        text = described.to_json()
        for path, content in small.items():
            self._put(small_path(self.folder, path), content)
        self._sent_manifest = True
        self._remote.put(MANIFEST_NAME, text)
        if update_latest:
            parent, name = self._remote.parent()
            parent.put(LATEST_NAME, f"{name}\n".encode())
        self._remove_old()

    def is_committed(self) -> bool:
        """Whether the target is what this save wrote."""
        try:
            manifest = self._remote.manifest()
        except (OSError, ValueError):
            return False
        return manifest is not None and manifest.save == self._token

    def abandon(self) -> None:
        """Removes this save's pieces, on rank 0, unless the manifest that names them may be there."""
        self._plan = None
        if self.rank != 0:
            return
        if self._sent_manifest:  # and perhaps it arrived, though the store said otherwise or nothing
            try:
                manifest = self._remote.manifest()
            except (OSError, ValueError):
                return
            if manifest is not None and manifest.save == self._token:
                return
        with contextlib.suppress(OSError):
            self._remote.remove(self.folder)

    def _put(self, path: str, content: bytes) -> None:
        self._remote.put(path, content)

    @contextmanager
    def _sink(
        self,
        layout: FileLayout,
        threads: int,
        bytes_per_second: float | None,
        wrote: Callable[[int], object] | None,
    ) -> Iterator[Sink]:
        sink = _ObjectSink(self._remote.open_new(layout.path), layout, bytes_per_second, wrote)
        try:
            yield sink
        except BaseException:
            sink.discard()
            raise

    def _remove_old(self) -> None:
        """What is left behind is no fault of the new checkpoint: the next save removes it."""
        old = self._old
        try:
            for name in self._remote.names():
                if name.startswith(FOLDER_PREFIX) and name != self.folder:
                    self._remote.remove(name)
            if old is not None and old.pieces is None:
                for path in old.files:
                    self._remote.remove(path)
        except OSError as error:
            warnings.warn(f"{self._remote.url}: what it was before could not be removed: {error}", stacklevel=2)


class _ObjectSink:
    """An object that is written from its beginning to its end."""

    def __init__(
        self, file: Any, layout: FileLayout, bytes_per_second: float | None, wrote: Callable[[int], object] | None
    ) -> None:
        self._file, self._at, self._wrote = file, len(layout.header), wrote
        self._pace = Pace(bytes_per_second)
        file.write(layout.header)

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        assert offset == self._at, "slices come in the order of the file"
        flat = as_bytes(data)
        for begin in range(0, flat.numel(), _CHUNK_BYTES):
            chunk = memory_of(host := flat[begin : begin + _CHUNK_BYTES].cpu())
            self._pace.wait(len(chunk))
            seen(chunk)
            self._file.write(bytes(chunk))
            if self._wrote is not None:
                self._wrote(host.numel())
        self._at += flat.numel()

    def finish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Forget what was written, where the file system can; an object that stays is named by no manifest."""
        with contextlib.suppress(Exception):
            self._file.discard()
