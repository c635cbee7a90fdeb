"""Which writer a checkpoint needs, from where it goes: in place, in pieces per host, or to an object store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint import LATEST_NAME, MANIFEST_NAME, CheckpointWriter, SaveWriter
from zero_strategy.checkpoint.host_writer import HostPieceWriter
from zero_strategy.checkpoint.remote import RemoteFolder, RemotePieceWriter, is_remote
from zero_strategy.checkpoint.retention import Found, which_to_remove
from zero_strategy.distributed.save_board import SaveBoard
from zero_strategy.saving.sharing import Sharing, find_out, warn_unshared


@dataclass(frozen=True)
class SavePlace:
    """Where a checkpoint goes, found out once for all that a save asks of it.

    Attributes:
        path: The checkpoint, as the user gave it.
        parent: The folder, or the URL of the folder, that it goes into.
        remote: Whether these are URLs.
        known: Whether nothing has to be found out about the folder.
    """

    path: str
    parent: str
    remote: bool
    known: bool


class SavePlaces:
    """What one engine knows of the folders that its checkpoints go into.

    Args:
        layout: The setting `checkpoint.layout`.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._known: dict[str, Sharing] = {}

    def place_of(self, directory: str | os.PathLike[str]) -> SavePlace:
        """The place of a checkpoint."""
        path = os.fspath(directory)
        if is_remote(path):
            return SavePlace(path, path.rstrip("/").rpartition("/")[0], remote=True, known=True)
        parent = os.path.dirname(os.path.abspath(path))
        return SavePlace(path, parent, remote=False, known=self._layout == "shared" or parent in self._known)

    def writer(self, place: SavePlace, board: SaveBoard, token: str, *, known: bool) -> SaveWriter:
        """The writer of a save; all ranks call it, and meet over the board where a folder is new.

        Args:
            place: Where the checkpoint goes.
            board: This rank's.
            token: Names the save; equal on all ranks.
            known: Whether the folder is known to all ranks: all find out about it, or none.

        Raises:
            OSError: If the folder cannot be written to.
            FailedElsewhereError: If that is so on another rank.
            ImportError: If it is a URL and fsspec is missing.
            ValueError: If it is a URL and `checkpoint.layout` is "shared".
        """
        ranks = {"rank": board.rank, "world_size": board.world_size}
        if not place.remote:
            sharing = self._sharing(place, board, token, known)
            if self._layout == "shared" or (self._layout == "auto" and sharing.shared):
                return CheckpointWriter(place.path, **ranks, token=token, cleans_later=True)
            return HostPieceWriter(place.path, **ranks, token=token, board=board, leader=sharing.leader)
        url = place.path
        if self._layout == "shared":
            raise ValueError(f"{url}: checkpoint.layout is 'shared'; URLs need 'auto' or 'pieces'")
        if not url.partition("://")[2].strip("/"):
            raise ValueError(f"{url}: names no folder; give a path in it, such as {url.rstrip('/')}//run/step-100")
        return RemotePieceWriter(url, **ranks, token=token, board=board)

    def removes(self, path: str | os.PathLike[str], rank: int) -> bool:
        """Whether this rank is the one that removes a checkpoint that it can see."""
        sharing = self._known.get(self.place_of(path).parent)
        return rank == (0 if sharing is None else sharing.leader)

    def _sharing(self, place: SavePlace, board: SaveBoard, token: str, known: bool) -> Sharing:
        if self._layout == "shared":
            return Sharing(True, 0)
        if not known:
            self._known.pop(place.parent, None)  # stays so if this fails
            parent = Path(place.parent)
            self._known[place.parent] = sharing = find_out(board, parent, token)
            if not sharing.shared and board.rank == 0 and self._layout == "auto":
                warn_unshared(sharing, parent)
        return self._known[place.parent]


def remove_remote(url: str | os.PathLike[str]) -> None:
    """Removes a checkpoint at a URL: first its manifest, so that it is none any more, then the rest."""
    folder = RemoteFolder(os.fspath(url))
    folder.remove(MANIFEST_NAME)
    folder.remove()


def prune_remote(url: str, keep_last: int, keep_every: int) -> None:
    """Removes what `retention.which_to_remove` chooses among the checkpoints at a URL; their age is their step.

    Raises:
        OSError: If the store fails.
    """
    folder = RemoteFolder(url)
    names = folder.names()
    latest = folder.read(LATEST_NAME).decode().strip() if LATEST_NAME in names else None
    found = []
    for name in set(names) - {LATEST_NAME}:
        try:
            manifest = folder.child(name).manifest()
        except ValueError:
            continue
        if manifest is not None:
            step = manifest.counters.get("global_steps")
            found.append(Found(Path(name), step if type(step) is int else None, 0, is_latest=name == latest))
    for old in which_to_remove(found, keep_last, keep_every):
        remove_remote(folder.child(old.path.name).url)
