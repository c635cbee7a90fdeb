"""Which writer a checkpoint needs, from where it goes: in place, in pieces per host, or to an object store."""

from __future__ import annotations

import os
from pathlib import Path

from zero_strategy.checkpoint import LATEST_NAME, MANIFEST_NAME, CheckpointWriter, SaveWriter
from zero_strategy.checkpoint.host_writer import HostPieceWriter
from zero_strategy.checkpoint.remote import RemoteFolder, is_remote
from zero_strategy.checkpoint.remote_writer import RemotePieceWriter
from zero_strategy.checkpoint.retention import Found, which_to_remove
from zero_strategy.distributed.save_board import SaveBoard
from zero_strategy.saving.sharing import Sharing, find_out, warn_unshared


class SavePlaces:
    """What one engine knows of the folders that its checkpoints go into.

    Args:
        layout: The setting `checkpoint.layout`.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._known: dict[str, Sharing] = {}

    def writer(self, directory: str | os.PathLike[str], board: SaveBoard, token: str) -> SaveWriter:
        """The writer of a save; all ranks call it, and meet over the board where a folder is new.

        Raises:
            OSError: If the folder cannot be written to.
            FailedElsewhereError: If that is so on another rank.
            ImportError: If it is a URL and fsspec is missing.
            ValueError: If it is a URL and `checkpoint.layout` is "shared".
        """
        rank, world_size = board.rank, board.world_size
        if is_remote(directory):
            if self._layout == "shared":
                raise ValueError(f"{os.fspath(directory)}: checkpoint.layout is 'shared'; URLs need 'auto' or 'pieces'")
            url = os.fspath(directory)
            if not url.partition("://")[2].strip("/"):
                raise ValueError(f"{url}: names no folder; give a path in it, such as {url.rstrip('/')}//run/step-100")
            return RemotePieceWriter(url, rank=rank, world_size=world_size, token=token, board=board)
        sharing = self._sharing(directory, board, token)
        if self._layout == "shared" or (self._layout == "auto" and sharing.shared):
            return CheckpointWriter(directory, rank=rank, world_size=world_size, token=token, cleans_later=True)
        return HostPieceWriter(
            directory, rank=rank, world_size=world_size, token=token, board=board, leader=sharing.leader
        )

    def knows(self, directory: str | os.PathLike[str]) -> bool:
        """Whether nothing has to be found out about where a checkpoint goes."""
        return self._layout == "shared" or is_remote(directory) or parent_of(directory) in self._known

    def forget(self, directory: str | os.PathLike[str]) -> None:
        """Find out again."""
        self._known.pop(parent_of(directory), None)

    def removes(self, path: str | os.PathLike[str], rank: int) -> bool:
        """Whether this rank is the one that removes a checkpoint that it can see."""
        sharing = None if is_remote(path) else self._known.get(parent_of(path))
        return rank == (0 if sharing is None else sharing.leader)

    def _sharing(self, directory: str | os.PathLike[str], board: SaveBoard, token: str) -> Sharing:
        if self._layout == "shared":
            return Sharing(True, 0)
        parent = parent_of(directory)
        if parent not in self._known:
            self._known[parent] = sharing = find_out(board, Path(parent), token)
            if not sharing.shared and board.rank == 0 and self._layout == "auto":
                warn_unshared(sharing, Path(parent))
        return self._known[parent]


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


def parent_of(path: str | os.PathLike[str]) -> str:
    """The folder, or the URL of the folder, that a checkpoint goes into."""
    if is_remote(path):
        return os.fspath(path).rstrip("/").rpartition("/")[0]
    return os.path.dirname(os.path.abspath(path))
