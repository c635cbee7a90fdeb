"""Places that hold the files of a checkpoint: a directory, several directories of one checkpoint, an object store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

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


class Folders(Storage):
    """Directories that together hold one checkpoint, such as those of several hosts."""

    def __init__(self, folders: Sequence[Storage]) -> None:
        self._folders = folders
        self.name = " + ".join(folder.name for folder in folders)

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        return next((size for folder in self._folders if (size := folder.size(path)) is not None), None)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        return self._holder(path).read(path)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """See `Storage.read_ranges`."""
        return [self._holder(path).read_ranges([(path, offset, nbytes)])[0] for path, offset, nbytes in ranges]

    def _holder(self, path: str) -> Storage:
        return next((folder for folder in self._folders if folder.size(path) is not None), self._folders[0])


def _part(file: Path, offset: int, nbytes: int) -> bytearray:
    content, done = bytearray(nbytes), 0
    fd = open_regular(file)
    try:
        with memoryview(content) as memory:
            while done < nbytes and (count := os.preadv(fd, [memory[done:]], offset + done)):
                done += count
    finally:
        os.close(fd)
    del content[done:]
    return content


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the directory that a file will be in, and those above it, unless they are there.

    Raises:
        OSError: If that cannot be, as where a file is in its place.
    """
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
