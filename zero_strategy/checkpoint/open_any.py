"""Opens a checkpoint of any kind: ours, plain Hugging Face weights, or another library's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.interop import Format, detect, format_named
from zero_strategy.checkpoint.locate import checkpoint_directory, looks_saved, newest_complete
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.names import is_inner_path
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.pieces import FOLDER_PREFIX
from zero_strategy.checkpoint.portable import PortableState, portable_of
from zero_strategy.checkpoint.portable_reader import PortableReader
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.checkpoint.remote import RemoteFolder, is_remote, newest_complete_at, remote_checkpoint
from zero_strategy.checkpoint.state_reader import StateReader
from zero_strategy.checkpoint.storage import Folder
from zero_strategy.runtime.regular_files import read_text

NATIVE = "native"
"""The name of our own format; plain safetensors weights belong to it."""


def open_any(
    path: str | os.PathLike[str], verify: bool = True, source: str | None = None, **options: Any
) -> StateReader:
    """Opens a checkpoint.

    Args:
        path: A directory or a file.
        verify: Compare checksums, where the checkpoint has any: ours.
        source: The format, one of `interop.FORMATS` or "native"; None finds it out.
        options: For the format's `read`, such as `tag`.

    Raises:
        ValueError: Naming the path, if there is nothing, it is damaged, or is of no known format.
    """
    if is_remote(path):
        return open_remote(os.fspath(path), verify=verify)
    entry = foreign_format(path) if source is None else None if source == NATIVE else format_named(source)
    if entry is None:
        return open_native(path, verify=verify)
    if not entry.reads:
        raise ValueError(f"{os.fspath(path)}: the format {entry.name!r} can be written only")
    found = Path(os.path.abspath(path))
    if not found.exists():
        raise ValueError(f"{found}: no such file or directory")
    return PortableReader(entry.load().read(found, **options), found)


def open_native(path: str | os.PathLike[str], *, verify: bool = True) -> StateReader:
    """Opens a checkpoint of ours, in ordinary files or in pieces, or plain weights.

    Raises:
        ValueError: As `CheckpointReader`.
    """
    found = checkpoint_directory(path)
    if found.is_dir() and any(found.glob(f"{FOLDER_PREFIX}*")):
        manifest = Manifest.load(found)
        if manifest.pieces is not None:
            return PieceReader(Folder(found), manifest, found, verify=verify)
    return CheckpointReader(found, verify=verify)


def open_remote(url: str, *, verify: bool = True) -> PieceReader:
    """Opens a checkpoint in an object store.

    Raises:
        ValueError: If there is none at the URL, or it is not one of pieces.
        ImportError: If fsspec, or what it needs for the URL, is not installed.
    """
    folder, manifest = remote_checkpoint(RemoteFolder(url))
    return PieceReader(folder, manifest, folder.url, verify=verify)


def state_of(reader: StateReader) -> PortableState:
    """The portable state behind an open checkpoint."""
    if isinstance(reader, PortableReader):
        return reader.state
    return portable_of(reader)


def checkpoint_in(path: str | os.PathLike[str]) -> str | None:
    """What a folder of checkpoints, or a checkpoint, gives to who names no checkpoint in it.

    Returns:
        "" for the path itself: a file, a folder with `latest`, or a checkpoint of any kind, be it damaged. Of a folder
        without `latest` (a first save that was killed right before it wrote that) the name of the newest complete
        checkpoint in it. None if there is nothing, or other things only, such as logs.

    Raises:
        OSError: If it cannot be looked into.
    """
    if is_remote(path):
        folder = RemoteFolder(os.fspath(path))
        names = folder.names()
        if MANIFEST_NAME in names or LATEST_NAME in names:
            return ""
        newest = newest_complete_at(folder)
        return None if newest is None else newest[0].url.rpartition("/")[2]
    found = Path(path)
    if not found.is_dir():
        return "" if found.exists() else None
    if (found / LATEST_NAME).is_file() or looks_saved(found) or foreign_format(found) is not None:
        return ""
    complete = newest_complete(found)
    return None if complete is None else complete.name


def foreign_format(path: str | os.PathLike[str]) -> Format | None:
    """The foreign format of a path; None if it is ours, plain weights, or nothing that is known."""
    found = Path(path)
    if not found.exists() or found.suffix == ".safetensors" or _is_ours(found):
        return None
    return detect(found)


def _is_ours(found: Path) -> bool:
    """Whether it is a checkpoint of ours, or the folder of one; others have a file `latest`, too."""
    if (found / MANIFEST_NAME).exists():
        return True
    try:
        named = read_text(found / LATEST_NAME).strip()
    except (OSError, ValueError):
        return False
    return is_inner_path(named) and (found / named / MANIFEST_NAME).is_file()
