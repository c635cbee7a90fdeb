"""Writing versions: into a directory, or into an object store behind a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from zero_strategy.checkpoint.disk import remove, sync, write_file
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.storage import RemoteFolder, is_remote
from zero_strategy.publish.folder import NAME, RECORD, Version, VersionFolder, record_of, version_name


class Target(Protocol):
    """A place for versions.

    Attributes:
        where: What users call it.
    """

    where: str

    def last(self) -> int:
        """The highest number in use, finished or not; -1 if there is none."""

    def anchor(self, number: int) -> str | Path:
        """Place of an anchor, for `ZeroEngine.save`."""

    def has_anchor(self, number: int) -> bool:
        """True if it is finished."""

    def write(self, number: int, name: str, content: bytes) -> None:
        """Write a rank's file of a change."""

    def finish(self, version: Version) -> None:
        """Write the record of a change whose files are there: from now on it counts."""

    def prune(self, keep: int) -> None:
        """Remove what is older than the last `keep` anchors."""


class Directory:
    """A directory, on a file system that renames atomically."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._folder, self.where = VersionFolder(directory), os.fspath(directory)

    def last(self) -> int:
        """See `Target`."""
        return max((number for _, number, _ in self._folder.found()), default=-1)

    def anchor(self, number: int) -> Path:
        """See `Target`."""
        return self._folder.anchor(number)

    def has_anchor(self, number: int) -> bool:
        """See `Target`."""
        return (self.anchor(number) / MANIFEST_NAME).is_file()

    def write(self, number: int, name: str, content: bytes) -> None:
        """See `Target`."""
        path = self._folder.delta(number) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)

    def finish(self, version: Version) -> None:
        """See `Target`."""
        path = self._folder.delta(version.number)
        sync(path)
        write_file(path / f".{RECORD}", record_of(version))
        os.replace(path / f".{RECORD}", path / RECORD)
        sync(path)
        sync(self._folder.directory)

    def prune(self, keep: int) -> None:
        """See `Target`."""
        anchors = self._folder.anchors()
        for _, number, path in self._folder.found() if len(anchors) > keep else ():
            if number < anchors[-keep]:
                remove(path)


class Bucket:
    """A folder of an object store, whose objects are there whole or not at all."""

    def __init__(self, url: str) -> None:
        self._folder, self.where = RemoteFolder(url), url

    def _numbers(self) -> list[tuple[int, str]]:
        matches = [(match, name) for name in self._folder.names() if (match := NAME.fullmatch(name))]
        return sorted((int(match[2]), name) for match, name in matches)

    def last(self) -> int:
        """See `Target`."""
        return max((number for number, _ in self._numbers()), default=-1)

    def anchor(self, number: int) -> str:
        """See `Target`."""
        return f"{self._folder.url}/{version_name('anchor', number)}"

    def has_anchor(self, number: int) -> bool:
        """See `Target`."""
        return self._folder.size(f"{version_name('anchor', number)}/{MANIFEST_NAME}") is not None

    def write(self, number: int, name: str, content: bytes) -> None:
        """See `Target`."""
        self._folder.put(f"{version_name('delta', number)}/{name}", content)

    def finish(self, version: Version) -> None:
        """See `Target`."""
        self.write(version.number, RECORD, record_of(version))

    def prune(self, keep: int) -> None:
        """See `Target`."""
        found = self._numbers()
        anchors = [n for n, name in found if name == version_name("anchor", n) and self.has_anchor(n)]
        for number, name in found if len(anchors) > keep else ():
            if number < anchors[-keep]:
                for last in (MANIFEST_NAME, RECORD):  # first what makes it count
                    self._folder.remove(f"{name}/{last}")
                self._folder.remove(name)


def target_of(to: str | os.PathLike[str]) -> Target:
    """The place that a path or a URL names.

    Raises:
        ImportError: If fsspec, or what it needs for the URL's scheme, is not installed.
        ValueError: If it is a URL of a scheme that cannot be written to.
    """
    if not is_remote(to):
        return Directory(to)
    url = os.fspath(to)
    if url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: publish in a directory or an object store, and serve that: publisher.serve()")
    return Bucket(url)
