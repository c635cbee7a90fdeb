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
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.storage import RemoteFolder
from zero_strategy.publish.folder import FILE, NAME, RECORD, Version, VersionFolder, parse_record, version_name

_WAIT_SECONDS = 60.0
_CHUNK = 1 << 20


class Source(Protocol):
    """Finished versions somewhere else."""

    def versions(self) -> dict[str, dict[str, int]]:
        """Names of versions, and their files with bytes.

        Raises:
            OSError: If the source cannot be reached.
        """

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

    def versions(self) -> dict[str, dict[str, int]]:
        """See `Source`."""
        found: Any = json.loads(self._answer("/").read())
        return {str(version): dict(files) for version, files in found.items() if NAME.fullmatch(version)}

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

    def versions(self) -> dict[str, dict[str, int]]:
        """See `Source`."""
        found = {}
        for version in self._folder.names():
            if NAME.fullmatch(version):
                files = self._files(version)
                if (MANIFEST_NAME if version.startswith("anchor-") else RECORD) in files:
                    found[version] = files
        return found

    def _files(self, path: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, size in self._folder.sizes(path).items():
            inner = {"": size} if size is not None else self._files(f"{path}/{name}")
            found |= {f"{name}/{below}".rstrip("/"): size for below, size in inner.items()}
        return found

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
        versions = self._source.versions()
        anchors = sorted(int(name[7:]) for name in versions if name.startswith("anchor-"))
        at = -1 if shown is None else shown.number
        if anchors and (shown is None or (anchors[-1] > at and not self._leads_on(versions, shown, anchors[-1]))):
            at = anchors[-1]
            self._bring(version_name("anchor", at), versions)
        while (name := version_name("delta", at + 1)) in versions:
            self._bring(name, versions)
            at += 1

    def _leads_on(self, versions: dict[str, dict[str, int]], shown: Version, anchor: int) -> bool:
        if version_name("delta", shown.number + 1) not in versions:
            return False
        path, name = self.directory / ".record", version_name("anchor", anchor)
        record = next((file for file in versions[name] if file.endswith(RECORD)), RECORD)
        self._source.fetch(name, record, path)
        return parse_record(path.read_bytes(), name).session == shown.session

    def bring_earlier_anchors(self) -> bool:
        """After the newest turned out to be damaged; False if there are no others."""
        versions = self._source.versions()
        names = [name for name in versions if name.startswith("anchor-") and not (self.directory / name).exists()]
        for name in names:
            self._bring(name, versions)
            at = int(name[7:])
            while (change := version_name("delta", at + 1)) in versions:
                self._bring(change, versions)
                at += 1
        return bool(names)

    def _bring(self, version: str, versions: dict[str, dict[str, int]]) -> None:
        target = self.directory / version
        if target.exists():
            return
        part = self.directory / f".part-{version}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name in versions[version]:
            if not FILE.fullmatch(name):
                raise ValueError(f"{version} has a file named {name!r}")
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            self._source.fetch(version, name, part / name)
        os.replace(part, target)

    def drop(self, number: int | None = None) -> None:
        """Remove the versions up to this one, which have been applied; None: all."""
        for _, found, path in self._folder.found():
            if number is None or found <= number:
                shutil.rmtree(path, ignore_errors=True)
