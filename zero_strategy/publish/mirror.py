"""Copies of published versions in a folder of the reader's own, from a server (`server`) or an object store.

A version is fetched whole under another name and then renamed, so that the reader of the folder sees what it would see
at its source. What it has applied is removed.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from zero_strategy.checkpoint.storage import RemoteFolder
from zero_strategy.publish.folder import (
    FILE,
    NAME,
    RECORD,
    Version,
    VersionFolder,
    last_file,
    parse_record,
    version_name,
)

_WAIT_SECONDS = 60.0
_CHUNK = 1 << 20


class Source(Protocol):
    """Versions somewhere else."""

    def names(self) -> list[str]:
        """Names of versions, in one request.

        Raises:
            OSError: If the source cannot be reached.
        """

    def files(self, version: str) -> list[str]:
        """Paths of the files of one of these; none of one that is not finished."""

    def fetch(self, version: str, name: str, to: Path) -> None:
        """Copy a file.

        Raises:
            FileNotFoundError: If it is not there (any more).
        """


class ServedVersions:
    """Those of a `VersionServer`.

    Args:
        url: "http://host:port".
        token: Its token.

    Raises:
        ValueError: If the URL is none of that form, or there is no token.
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
            raise ValueError(f"{url}: expected http://host:port, as publisher.serve(...) gives it")
        if not token:
            raise ValueError(f"{url}: subscribe(url, token=...) needs the token that publisher.serve(...) gives")
        self._url, self._headers = url, {"Authorization": f"Bearer {token}"}
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_WAIT_SECONDS)
        self._files: dict[str, list[str]] = {}

    def names(self) -> list[str]:
        """See `Source`."""
        found: Any = json.loads(self._answer("/").read())
        self._files = {str(version): list(files) for version, files in found.items() if NAME.fullmatch(version)}
        return list(self._files)

    def files(self, version: str) -> list[str]:
        """See `Source`."""
        return self._files[version]

    def fetch(self, version: str, name: str, to: Path) -> None:
        """See `Source`."""
        answer = self._answer(f"/{version}/{name}")
        with open(to, "wb") as file:
            shutil.copyfileobj(answer, file, _CHUNK)
        if answer.length:
            raise ConnectionError(f"{self._url}/{version}/{name} ended {answer.length} bytes early")

    def _answer(self, path: str) -> http.client.HTTPResponse:
        for last in (False, True):  # a connection that was idle may have been closed
            try:
                self._connection.request("GET", path, headers=self._headers)
                answer = self._connection.getresponse()
                break
            except (http.client.HTTPException, OSError) as error:
                self._connection.close()
                if last:
                    raise ConnectionError(f"{self._url}: {type(error).__name__}: {error}") from None
        if answer.status == 200:
            return answer
        answer.read()
        if answer.status == 404:
            raise FileNotFoundError(f"{self._url}{path}")
        if answer.status == 401:
            raise PermissionError(f"{self._url} refuses the token")
        raise ConnectionError(f"{self._url}{path}: HTTP status {answer.status}")


class StoredVersions:
    """Those of a folder behind a URL that fsspec knows, such as "s3://bucket/run"."""

    def __init__(self, url: str) -> None:
        self._folder = RemoteFolder(url)

    def names(self) -> list[str]:
        """See `Source`."""
        return [version for version in self._folder.names() if NAME.fullmatch(version)]

    def files(self, version: str) -> list[str]:
        """See `Source`."""
        found = list(self._below(version, ""))
        return found if last_file(version) in found else []

    def _below(self, version: str, path: str) -> Iterator[str]:
        for name, size in self._folder.sizes(f"{version}/{path}").items():
            if size is not None:
                yield path + name
            else:
                yield from self._below(version, f"{path}{name}/")

    def fetch(self, version: str, name: str, to: Path) -> None:
        """See `Source`."""
        to.write_bytes(self._folder.read(f"{version}/{name}"))


def source_of(url: str, token: str | None) -> Source:
    """The versions behind a URL.

    Raises:
        ImportError: If fsspec, or what it needs for the scheme, is not installed.
        ValueError: If the URL cannot be one.
    """
    return ServedVersions(url, token) if url.startswith("http://") else StoredVersions(url)


class Mirror:
    """A folder that gets what its reader needs next.

    Args:
        source: Where versions come from.
        directory: Parent of the folder, which is removed with this object; None: the system's for temporary files.
    """

    def __init__(self, source: Source, directory: str | os.PathLike[str] | None = None) -> None:
        self._source = source
        self.directory = Path(tempfile.mkdtemp(prefix="zero-weights-", dir=directory))
        self._folder = VersionFolder(self.directory)
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def fetch(self, shown: Version | None) -> None:
        """Bring the newest anchor if the changes after `shown` do not lead there, and all changes after either."""
        names = self._source.names()
        at = -1 if shown is None else shown.number
        for anchor in reversed(_anchors(names)):
            if anchor <= at or (shown is not None and self._leads_on(names, shown, anchor)):
                break
            if self._bring(version_name("anchor", anchor)):
                at = anchor
                break
        self._bring_changes(names, at)

    def _leads_on(self, names: list[str], shown: Version, anchor: int) -> bool:
        name, path = version_name("anchor", anchor), self.directory / ".record"
        if version_name("delta", shown.number + 1) not in names:
            return False
        record = next((file for file in self._source.files(name) if file.endswith(RECORD)), None)
        if record is None:
            return True  # it is not finished
        self._source.fetch(name, record, path)
        return parse_record(path.read_bytes(), name).session == shown.session

    def bring_earlier_anchors(self) -> bool:
        """After the newest turned out to be damaged; False if there are no others."""
        names = self._source.names()
        missing = [n for n in _anchors(names) if not (self.directory / version_name("anchor", n)).exists()]
        brought = [n for n in missing if self._bring(version_name("anchor", n))]
        for number in brought:
            self._bring_changes(names, number)
        return bool(brought)

    def _bring_changes(self, names: list[str], after: int) -> None:
        while (name := version_name("delta", after + 1)) in names and self._bring(name):
            after += 1

    def _bring(self, version: str) -> bool:
        """Copy a version, unless it is here; False if it is not finished."""
        target = self.directory / version
        if target.exists():
            return True
        files = self._source.files(version)
        part = self.directory / f".part-{version}"
        shutil.rmtree(part, ignore_errors=True)
        for name in files:
            if not FILE.fullmatch(name):
                raise ValueError(f"{version} has a file named {name!r}")
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            self._source.fetch(version, name, part / name)
        if files:
            os.replace(part, target)
        return bool(files)

    def drop(self, number: int | None = None) -> None:
        """Remove the versions up to this one, which have been applied; None: all."""
        for _, found, path in self._folder.found():
            if number is None or found <= number:
                shutil.rmtree(path, ignore_errors=True)


def _anchors(names: list[str]) -> list[int]:
    """Numbers of anchors, in order."""
    found = [match for name in names if (match := NAME.fullmatch(name)) and match[1] == "anchor"]
    return sorted(int(match[2]) for match in found)
