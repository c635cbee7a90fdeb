"""Places that hold the files of a checkpoint: a directory, or an object store with a URL, through fsspec.

Of an object store whole objects are put and parts are read, nothing else. fsspec is imported when a URL is used; which
schemes work depends on what is installed (s3fs, gcsfs, adlfs, ...). Credentials and options are fsspec's own: its
configuration files and environment variables.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.disk import Pace, WriteOptions, replace_file, sync
from zero_strategy.checkpoint.layout import FileLayout, is_inner_path
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.piece_writer import Board, PieceWriter, Sink
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.ranges import FOLDER_PREFIX, rank_path, small_path
from zero_strategy.checkpoint.writer import naming_latest
from zero_strategy.runtime.host_bytes import Seen, as_bytes, memory_of
from zero_strategy.runtime.regular_files import open_regular, read_regular, size_of


class Storage(ABC):
    """Files under relative paths, read only.

    Attributes:
        name: What users call it, for errors.
    """

    name: str

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None if it is not there.

        Raises:
            ValueError: If something other than a file is.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A whole file.

        Raises:
            FileNotFoundError: If it is not there.
            ValueError: If something other than a file is.
        """

    @abstractmethod
    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """Several parts of files at once.

        Args:
            ranges: (path, byte offset, bytes).

        Returns:
            Their bytes, fewer where a file ends early.
        """


class Folder(Storage):
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = str(directory)

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        return size_of(self.directory / path)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        return read_regular(self.directory / path)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """See `Storage.read_ranges`."""
        return [_part(self.directory / path, offset, nbytes) for path, offset, nbytes in ranges]


def _part(file: Path, offset: int, nbytes: int) -> bytearray:
    content, done = bytearray(nbytes), 0
    fd = open_regular(file)
    try:
        with memoryview(content) as memory:
            # A read may give less than was asked for; nothing at all is the end of the file.
            while done < nbytes and (count := os.preadv(fd, [memory[done:]], offset + done)):
                done += count
    finally:
        os.close(fd)
    del content[done:]
    return content


# Memory of the copy that is handed over, and of one that comes from a device.
_CHUNK_BYTES = 8 << 20


def is_remote(path: object) -> bool:
    """True if a path is a URL, such as "s3://bucket/run"."""
    return isinstance(path, (str, os.PathLike)) and "://" in os.fspath(path)


def is_remote_checkpoint(url: str) -> bool:
    """True if there is a checkpoint of ours at a URL, or a folder of them; a URL of one object is no such thing."""
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
        """Entries directly in here; nothing if there is no such folder."""
        return sorted(self.sizes())

    def sizes(self, path: str = "") -> dict[str, int | None]:
        """Name -> bytes of what lies directly in a folder, in one request; None for folders."""
        # fsspec remembers listings, and other processes write here.
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
        # All at once: a store's answers take long, and come side by side.
        return [bytearray(content) for content in self._fs.cat_ranges(paths, starts, stops, on_error="raise")]

    def put(self, path: str, content: bytes) -> None:
        """Makes or replaces an object: readers see the old one or the new one."""
        self._make_room(path)
        if self._local is None:
            self._fs.pipe_file(self._path(path), content)
            return
        # Of a file that is opened and written, readers and a crash would find a part.
        replace_file(self._local.directory / path, content)
        self._flush_folders(path)

    def open_new(self, path: str) -> Any:
        """A new object, open for writing from its beginning to its end; it is there when it is closed."""
        self._make_room(path)
        return self._fs.open(self._path(path), "wb")

    def flush(self, path: str) -> None:
        """Returns when an object that was closed is safe; a store's is when it is closed."""
        if self._local is not None:
            sync(self._local.directory / path)
            self._flush_folders(path)

    def remove(self, path: str = "") -> None:
        """Removes an object, or all under a path; nothing there is no error."""
        # What is removed is found by a listing, which fsspec may remember.
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

    def _flush_folders(self, path: str) -> None:
        """Flushes the folders in here that a file is in, which may be new."""
        for parent in Path(path).parents:
            sync(Path(self._root) / parent)

    def _make_room(self, path: str) -> None:
        """Some file systems behind fsspec have real directories."""
        self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)


def _is_local(fs: object) -> bool:
    """True if it is fsspec's view of this machine's files, and no kind of it."""
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
    # By steps: not all of fsspec's stores tell when an object was written.
    return max(found, key=lambda entry: (entry[1].counters.get("global_steps") or 0, entry[0].url), default=None)


_LEFTOVERS = (FOLDER_PREFIX, f".{MANIFEST_NAME}.")
"""Beginnings of names that a crashed save leaves in a checkpoint: pieces, and a manifest's temporary local file."""


class RemotePieceWriter(PieceWriter):
    """One rank's part in saving a checkpoint to a URL, in pieces: there nothing can be changed in place or renamed.

        every rank    its file under pieces-<token>/, its small files
        rank 0        the other small files, then the manifest: that one PUT is the commit
                      then `latest`, then what the old manifest named is removed

    Until the manifest is replaced the old one names the old pieces, which are all there. What a crash leaves behind
    is removed by the next save of the same target.

    Args:
        url: where the checkpoint will be.
        rank, world_size, token, board: see `PieceWriter`.
    """

    def __init__(self, url: str, *, rank: int, world_size: int, token: str, board: Board) -> None:
        super().__init__(url, rank=rank, world_size=world_size, token=token, board=board)
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
        # One rank: the others wait for it before their first byte, so nothing of theirs can be removed.
        if self.rank != 0:
            return
        names = self._remote.names()
        if MANIFEST_NAME in names:
            try:
                self._old = self._remote.manifest()
            # A damaged one may be replaced, too. It may be of another version: until then all that it may name stays.
            except ValueError:
                return
        elif foreign := [name for name in names if not name.startswith(_LEFTOVERS)]:
            raise ValueError(
                f"{self._remote.url} is not a checkpoint and holds {foreign[:3]}; it will not be overwritten"
            )
        # The checkpoint that is there stays whole until the new manifest is.
        kept = self._old.pieces.folder if self._old is not None and self._old.pieces is not None else None
        for name in names:
            if name.startswith(_LEFTOVERS) and name != kept:
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
        # Before the manifest, which names them.
        for path, content in small.items():
            self._put(path, content)
        # Before the call, which may fail although the manifest has arrived.
        self._sent_manifest = True
        self._remote.put(MANIFEST_NAME, text)
        # Behind the manifest: it never names what is not there.
        if update_latest:
            with naming_latest(self.target):
                parent, name = self._remote.parent()
                parent.put(LATEST_NAME, f"{name}\n".encode())
        # Last: until the manifest is replaced, readers follow the old one to the old pieces.
        self._remove_old()

    def abandon(self) -> None:
        """Removes this save's pieces, on rank 0, unless the manifest that names them may be there."""
        self._plan = None
        if self.rank != 0:
            return
        if self._sent_manifest:  # and perhaps it arrived, though the store said otherwise or nothing
            try:
                manifest = self._remote.manifest()
            # In doubt all pieces stay: a manifest without its pieces is worse than pieces without a manifest.
            except (OSError, ValueError):
                return
            if manifest is not None and manifest.save == self._token:
                return
        # The error that led here is the one to be told; the next save removes the rest.
        with contextlib.suppress(OSError):
            self._remote.remove(self.folder)

    def _put(self, path: str, content: bytes) -> None:
        self._remote.put(small_path(self.folder, path), content)

    def _manifest_there(self) -> Manifest | None:
        return self._remote.manifest()

    @contextmanager
    def _sink(self, layout: FileLayout, options: WriteOptions) -> Iterator[Sink]:
        sink = _ObjectSink(self._remote.open_new(layout.path), layout, options)
        try:
            yield sink
        except BaseException:
            sink.discard()
            raise
        # Before this rank's report, which says that the bytes are safe.
        self._remote.flush(layout.path)

    def _remove_old(self) -> None:
        """Leave the rest to the next save: it is no fault of the new checkpoint."""
        old = self._old
        try:
            for name in self._remote.names():
                if name.startswith(_LEFTOVERS) and name != self.folder:
                    self._remote.remove(name)
            # It was an ordinary checkpoint that somebody uploaded.
            if old is not None and old.pieces is None:
                for path in old.files:
                    self._remote.remove(path)
        except OSError as error:
            warnings.warn(f"{self._remote.url}: what it was before could not be removed: {error}", stacklevel=2)


class _ObjectSink:
    """An object that is written from its beginning to its end."""

    def __init__(self, file: Any, layout: FileLayout, options: WriteOptions) -> None:
        self._file, self._at, self._wrote = file, len(layout.header), options.get("wrote")
        self._pace = Pace(options.get("bytes_per_second"))
        file.write(layout.header)

    def write(self, data: torch.Tensor, offset: int, seen: Seen) -> None:
        assert offset == self._at, "slices come in the order of the file"
        flat = as_bytes(data)
        for begin in range(0, flat.numel(), _CHUNK_BYTES):
            chunk = memory_of(host := flat[begin : begin + _CHUNK_BYTES].cpu())
            self._pace.wait(len(chunk))
            seen(chunk)
            # A copy: fsspec may keep what it is given until it sends it, and this memory is a tensor's.
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


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the directory that a file will be in, and those above it, unless they are there.

    Raises:
        OSError: If that cannot be, as where a file is in its place.
    """
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
