"""Object stores and other places with a URL, through fsspec: whole objects are put and parts are read, nothing else.

fsspec is imported when a URL is used; which schemes work depends on what is installed (s3fs, gcsfs, adlfs, ...).
Credentials and options are fsspec's own: its configuration files and environment variables.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.names import is_inner_path
from zero_strategy.checkpoint.pieces import rank_path
from zero_strategy.checkpoint.save_writer import LATEST_NAME
from zero_strategy.checkpoint.storage import Folder, Storage


def is_remote(path: object) -> bool:
    """Whether a path is a URL, such as "s3://bucket/run"."""
    return isinstance(path, (str, os.PathLike)) and "://" in os.fspath(path)


def is_remote_checkpoint(url: str) -> bool:
    """Whether there is a checkpoint of ours at a URL, or a folder of them; a URL of one object is no such thing."""
    if url.startswith(("http://", "https://")):
        return False  # files for Lightning to download
    try:
        names = RemoteFolder(url).names()
    except ImportError:
        return False
    return MANIFEST_NAME in names or LATEST_NAME in names


def join(parent: str | os.PathLike[str], name: str) -> str:
    """A name inside a directory or URL."""
    if is_remote(parent):
        return f"{str(os.fspath(parent)).rstrip('/')}/{name}"
    return os.path.join(parent, name)


class RemoteFolder(Storage):
    """All objects under a URL.

    Args:
        url: Of any scheme that fsspec knows.

    Raises:
        ImportError: If fsspec, or what it needs for the scheme, is not installed.
        ValueError: If it knows no such scheme.
    """

    def __init__(self, url: str) -> None:
        self.name = self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(
                f"{url}: {error}; URLs need fsspec (pip install fsspec) and what it needs for the "
                "scheme, such as s3fs for s3:// and gcsfs for gs://"
            ) from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None
        self._fs: Any = fs
        self._root = str(root).rstrip("/")
        # Here a name may be that of a pipe, which fsspec would open and wait at.
        self._local = Folder(Path(self._root)) if _is_local(fs) else None

    def parent(self) -> tuple[RemoteFolder, str]:
        """The folder that this one is in, and its name there."""
        parent, _, name = self.url.rpartition("/")
        return RemoteFolder(parent), name

    def child(self, name: str) -> RemoteFolder:
        """A folder in this one."""
        return RemoteFolder(f"{self.url}/{name}")

    def names(self) -> list[str]:
        """What lies directly in here; nothing if there is no such folder."""
        return sorted(self.sizes())

    def sizes(self, path: str = "") -> dict[str, int | None]:
        """Name -> bytes of what lies directly in a folder, in one request; None for folders."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(path), detail=True)
        except FileNotFoundError:
            return {}
        names = {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in found}
        return {name: entry["size"] if entry["type"] == "file" else None for name, entry in names.items() if name}

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        try:
            info = self._fs.info(self._path(path))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        if self._local is not None:
            return self._local.read(path)
        return bytes(self._fs.cat_file(self._path(path)))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """See `Storage.read_ranges`."""
        if self._local is not None:
            return self._local.read_ranges(ranges)
        paths = [self._path(path) for path, _, _ in ranges]
        starts = [offset for _, offset, _ in ranges]
        stops = [offset + nbytes for _, offset, nbytes in ranges]
        return [bytearray(content) for content in self._fs.cat_ranges(paths, starts, stops, on_error="raise")]

    def put(self, path: str, content: bytes) -> None:
        """Makes or replaces an object: readers see the old one or the new one."""
        self._make_room(path)
        self._fs.pipe_file(self._path(path), content)

    def open_new(self, path: str) -> Any:
        """A new object, open for writing from its beginning to its end; it is there when it is closed."""
        self._make_room(path)
        return self._fs.open(self._path(path), "wb")

    def remove(self, path: str = "") -> None:
        """Removes an object, or all under a path; nothing there is no error."""
        self._fs.invalidate_cache()
        try:
            self._fs.rm(self._path(path), recursive=True)
        except FileNotFoundError:
            return

    def manifest(self) -> Manifest | None:
        """The manifest in here, if there is one.

        Raises:
            ValueError: If it cannot be trusted.
        """
        try:
            content = self.read(MANIFEST_NAME)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return Manifest.from_json(content, f"{self.url}/{MANIFEST_NAME}")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _make_room(self, path: str) -> None:
        """Some file systems behind fsspec have real directories."""
        self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)


def _is_local(fs: object) -> bool:
    """Whether it is fsspec's view of this machine's files, and no kind of it."""
    from fsspec.implementations.local import LocalFileSystem

    return type(fs) is LocalFileSystem


def remote_checkpoint(folder: RemoteFolder, *, fall_back: bool = True) -> tuple[RemoteFolder, Manifest]:
    """The checkpoint at a URL, or the one that `latest` there names.

    Args:
        folder: What the user gave.
        fall_back: Where `latest` names what is no complete checkpoint, warn and take the newest complete one beside it.

    Raises:
        ValueError: If there is none.
    """
    manifest = folder.manifest()
    if manifest is not None:
        return folder, manifest
    try:
        name = folder.read(LATEST_NAME).decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder.url}/{LATEST_NAME}: is no text in UTF-8 ({error})") from None
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{folder.url}: no checkpoint there: neither {MANIFEST_NAME} nor {LATEST_NAME}") from None
    try:
        if not is_inner_path(name) or "/" in name:
            raise ValueError(f"{name!r} is not the name of a checkpoint beside it")
        return _complete(folder, name)
    except ValueError as error:
        found = newest_complete_at(folder, name) if fall_back else None
        if found is None:
            raise
        message = f"{folder.url}/{LATEST_NAME} names {name}, which cannot be loaded ({error}); taking {found[0].url}"
        warnings.warn(message, stacklevel=3)
        return found


def _complete(folder: RemoteFolder, name: str) -> tuple[RemoteFolder, Manifest]:
    child = folder.child(name)
    manifest = child.manifest()
    if manifest is None:
        raise ValueError(f"{child.url}: not a complete checkpoint: it has no {MANIFEST_NAME}")
    if manifest.pieces is not None:
        sizes = child.sizes(manifest.pieces.folder)
        for rank, (size, _) in manifest.pieces.ranks.items():
            path = rank_path(manifest.pieces.folder, rank)
            if (actual := sizes.get(path.rpartition("/")[2])) != size:
                what = "is missing" if actual is None else f"has {actual} bytes, the manifest says {size}"
                raise ValueError(f"{child.url}: file {path} {what}")
    return child, manifest


def newest_complete_at(folder: RemoteFolder, without: str = "") -> tuple[RemoteFolder, Manifest] | None:
    """The complete checkpoint of the most steps."""
    found = []
    for name in folder.names():
        if name not in (without, LATEST_NAME):
            with contextlib.suppress(ValueError):
                found.append(_complete(folder, name))
    return max(found, key=lambda entry: (entry[1].counters.get("global_steps") or 0, entry[0].url), default=None)
