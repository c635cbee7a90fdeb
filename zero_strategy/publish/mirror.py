"""Copies of published versions in a folder of the reader's own, from a server (`server`) or an object store.

A version is fetched whole under another name and then renamed, so that the reader of the folder sees what it would see
at its source. What it has applied is removed.
"""

from __future__ import annotations

import errno
import http.client
import math
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from zero_strategy.checkpoint.storage import RemoteFolder
from zero_strategy.publish.folder import (
    MOST_RECORD_BYTES,
    RECORD,
    Version,
    VersionFolder,
    is_file_path,
    last_file,
    missing_change,
    parse_name,
    parse_record,
    version_name,
)
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_regular
from zero_strategy.runtime.shown import brief, shown

_ANSWER_SECONDS = 60.0
"""Until an answer's head and a listing have come."""
_LEAST_BYTES_PER_SECOND = 16 << 10
"""That a file comes at; a server that sends less holds its readers up for nothing."""
MOST_LISTING_BYTES = 64 << 20
_CHUNK = 1 << 20
_STORED_CHUNK = 64 << 20


class Source(Protocol):
    """Versions somewhere else.

    Attributes:
        end: When the caller's patience ends, by `time.monotonic`.
    """

    end: float

    def names(self) -> list[str]:
        """Names of versions, in one request.

        Raises:
            OSError: If the source cannot be reached, or its answer does not come in time or is no listing.
        """

    def files(self, version: str) -> Mapping[str, int]:
        """Paths of the files of one of these, and their bytes; none of one that is not finished."""

    def fetch(self, version: str, name: str, to: Path, nbytes: int) -> None:
        """Copy a file of so many bytes, or what is not there yet of one whose beginning is.

        Raises:
            FileNotFoundError: If it is not there (any more).
            OSError: If it does not come in time, or has not so many bytes.
        """


class _TimedSocket(socket.socket):
    """A socket whose reads end at a moment, however the bytes come: a byte in a while does not begin the time anew."""

    end = math.inf

    def recv_into(self, *args: Any, **options: Any) -> int:
        """See the socket's; raises TimeoutError after the end."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer has not come in time")
        # Anew for each read: the time that is left, and not the whole.
        self.settimeout(None if left == math.inf else left)
        return super().recv_into(*args, **options)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        # http.client makes a plain socket, whose time-out begins anew with every byte that comes.
        self.sock = _TimedSocket(fileno=self.sock.detach())

    def ends(self, at: float) -> None:
        """Set when what is sent and read has to be done."""
        # Not zero, which means not to wait at all.
        self.timeout = max(at - time.monotonic(), 0.001)
        if isinstance(self.sock, _TimedSocket):
            self.sock.end = at
            self.sock.settimeout(self.timeout)


class ServedVersions:
    """Versions of a `VersionServer`.

    Nothing of an answer is believed: its length, its form and the time that it takes are bounded.

    Args:
        url: "http://host:port".
        token: Its token.

    Raises:
        ValueError: If the URL is none of that form, or there is no token.
    """

    def __init__(self, url: str, token: str | None) -> None:
        try:
            parts = urlsplit(url)
            valid = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"{shown(url)}: expected http://host:port, as publisher.serve(...) gives it")
        if not token:
            raise ValueError(f"{url}: subscribe(url, token=...) needs the token that publisher.serve(...) gives")
        # It becomes a header's text, which a line break would end.
        if not all("!" <= each <= "~" for each in token):
            raise ValueError(f"{url}: the token must be printable ASCII without spaces")
        self.end = math.inf
        self._url, self._headers = url.rstrip("/"), {"Authorization": f"Bearer {token}"}
        self._connection = _Connection(str(parts.hostname), parts.port, timeout=_ANSWER_SECONDS)
        self._files: dict[str, dict[str, int]] = {}

    def names(self) -> list[str]:
        """See `Source`."""
        answer = self._answer("/", _ANSWER_SECONDS)
        # One byte more than is allowed tells a listing that is too long.
        content = self._read(answer, MOST_LISTING_BYTES + 1)
        if len(content) > MOST_LISTING_BYTES:
            # What is still to come would be taken for the next answer.
            self._connection.close()
            raise ConnectionError(f"{self._url}: its listing has more than {MOST_LISTING_BYTES} bytes")
        try:
            found = bounded_json.parse(content, self._url)
        except ValueError as error:
            raise ConnectionError(f"{error}; expected a listing of versions") from None
        if not isinstance(found, dict) or not all(map(_is_listing, found.values())):
            raise ConnectionError(f"{self._url}: sent {brief(found)}, which is no listing of versions")
        self._files = {version: files for version, files in found.items() if parse_name(version)}
        return list(self._files)

    def files(self, version: str) -> Mapping[str, int]:
        """See `Source`."""
        return self._files[version]

    def fetch(self, version: str, name: str, to: Path, nbytes: int) -> None:
        """See `Source`."""
        path, have = f"/{version}/{name}", to.stat().st_size if to.exists() else 0
        # A file of no bytes has still to be made.
        if have == nbytes and nbytes:
            return
        seconds = _ANSWER_SECONDS + nbytes / _LEAST_BYTES_PER_SECOND
        answer = self._answer(path, seconds, start=have if have < nbytes else 0)
        # A server may send the whole, asked for its end; and what is too long is not its beginning.
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT or have > nbytes:
            have = 0
        # Before a byte is written: the disk's room was counted by the listing.
        if answer.length != nbytes - have:
            self._connection.close()
            raise ConnectionError(f"{self._url}{path}: {answer.length} bytes are to come, not {nbytes - have}")
        with open(to, "r+b" if have else "wb") as file:
            file.seek(have)
            while have < nbytes:
                part = self._timed(path, lambda: answer.read1(_CHUNK))
                if not part:
                    raise ConnectionError(f"{self._url}{path} ended {nbytes - have} bytes early")
                file.write(part)
                have += len(part)
        # Some Pythons (3.11.7) do not see that `read1` has read all, and send no other request on this connection.
        answer.close()

    def _read(self, answer: http.client.HTTPResponse, most: int) -> bytes:
        return self._timed("/", lambda: answer.read(most))

    def _timed(self, path: str, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except (http.client.HTTPException, OSError, ValueError) as error:
            self._connection.close()
            raise ConnectionError(f"{self._url}{path}: {type(error).__name__}: {shown(error)}") from None

    def _answer(self, path: str, seconds: float, *, start: int = 0) -> http.client.HTTPResponse:
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        end = min(self.end, time.monotonic() + seconds)
        for last in (False, True):  # a connection that was idle may have been closed
            try:
                self._connection.ends(end)
                if self._connection.sock is None:
                    self._connection.connect()
                    # Again, since a new socket has no end yet.
                    self._connection.ends(end)
                self._connection.request("GET", path, headers=headers)
                answer = self._connection.getresponse()
                break
            except (http.client.HTTPException, OSError, ValueError) as error:
                self._connection.close()
                if last or time.monotonic() >= end:
                    raise ConnectionError(f"{self._url}: {type(error).__name__}: {shown(error)}") from None
        if answer.status in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
            return answer
        self._connection.close()  # what else it may have sent is of no use
        if answer.status == http.HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(f"{self._url}{path}")
        if answer.status == http.HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{self._url} refuses the token")
        raise ConnectionError(f"{self._url}{path}: HTTP status {answer.status}")


def _is_listing(files: object) -> bool:
    """True of a version's files and their bytes."""
    return isinstance(files, dict) and all(type(size) is int and 0 <= size < 1 << 62 for size in files.values())


class StoredVersions:
    """Versions in a folder behind a URL that fsspec knows, such as "s3://bucket/run"."""

    def __init__(self, url: str) -> None:
        self.end = math.inf
        self._folder = RemoteFolder(url)

    def names(self) -> list[str]:
        """See `Source`."""
        return [version for version in self._folder.names() if parse_name(version)]

    def files(self, version: str) -> Mapping[str, int]:
        """See `Source`."""
        found = dict(self._below(version, "", 0))
        # Without it the version is still being written, or is being removed.
        return found if last_file(version) in found else {}

    def _below(self, version: str, path: str, depth: int) -> Iterator[tuple[str, int]]:
        for name, size in self._folder.sizes(f"{version}/{path}").items():
            if size is not None:
                yield path + name, size
            elif depth < _MOST_DEPTH:
                yield from self._below(version, f"{path}{name}/", depth + 1)

    def fetch(self, version: str, name: str, to: Path, nbytes: int) -> None:
        """See `Source`."""
        have = to.stat().st_size if to.exists() else 0
        if have > nbytes:
            have = 0
        with open(to, "r+b" if have else "wb") as file:
            file.seek(have)
            while have < nbytes:
                # Between requests: one that fsspec has begun cannot be ended from here.
                if time.monotonic() > self.end:
                    raise ConnectionError(f"{self._folder.url}/{version}/{name} has not come in time")
                # In parts, of which each is in memory; what has come is kept when the time is over.
                asked = min(_STORED_CHUNK, nbytes - have)
                (part,) = self._folder.read_ranges([(f"{version}/{name}", have, asked)])
                if len(part) != asked:
                    raise ConnectionError(f"{self._folder.url}/{version}/{name} ended {nbytes - have} bytes early")
                file.write(part)
                have += asked


_MOST_DEPTH = 8
"""Folders in each other below a version's."""


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

    Attributes:
        lost: Words for a change that the source has no more, without an anchor after it; "" as long as there is none.
    """

    def __init__(self, source: Source, directory: str | os.PathLike[str] | None = None) -> None:
        self._source = source
        self.directory = Path(tempfile.mkdtemp(prefix="zero-weights-", dir=directory))
        self._folder = VersionFolder(self.directory)
        self.lost = ""
        # No copies of weights are left on a reader's disk, also where it ends with an error.
        weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def fetch(self, shown: Version | None, end: float = math.inf) -> None:
        """Bring the newest anchor if the changes after `shown` do not lead there, and all changes after either.

        What has come before the end of the caller's patience is gone on with the next time.

        Raises:
            OSError: See `Source`; also if there is no room for what is to come.
            ValueError: If names or a record are not what they should be.
        """
        self._source.end = end
        names = self._source.names()
        at = -1 if shown is None else shown.number
        for anchor in reversed(_anchors(names)):
            if anchor <= at or (shown is not None and self._leads_on(names, shown, anchor)):
                break
            if self._bring(version_name("anchor", anchor)):
                at = anchor
                break
        at = self._bring_changes(names, at)
        self.lost = missing_change([found for name in names if (found := parse_name(name))], at) if at >= 0 else ""

    def _leads_on(self, names: list[str], shown: Version, anchor: int) -> bool:
        name, path = version_name("anchor", anchor), self.directory / ".record"
        if version_name("delta", shown.number + 1) not in names:
            return False
        files = self._source.files(name)
        record = next((file for file in files if file.endswith(RECORD)), None)
        if record is None:
            return True  # it is not finished
        _check_files(name, {record: files[record]})
        # Before it is fetched: the number is the source's word.
        if files[record] > MOST_RECORD_BYTES:
            raise ValueError(f"{name}/{record}: has {files[record]} bytes, and at most {MOST_RECORD_BYTES} are read")
        # What is there is another version's record, and `fetch` would go on behind its bytes.
        path.unlink(missing_ok=True)
        self._source.fetch(name, record, path, files[record])
        return parse_record(read_regular(path, MOST_RECORD_BYTES), name).session == shown.session

    def bring_earlier_anchors(self) -> bool:
        """After the newest turned out to be damaged; False if there are no others."""
        names = self._source.names()
        missing = [n for n in _anchors(names) if not (self.directory / version_name("anchor", n)).exists()]
        brought = [n for n in missing if self._bring(version_name("anchor", n))]
        for number in brought:
            self._bring_changes(names, number)
        return bool(brought)

    def _bring_changes(self, names: list[str], after: int) -> int:
        """The number of the last change that is here."""
        while (name := version_name("delta", after + 1)) in names and self._bring(name):
            after += 1
        return after

    def _bring(self, version: str) -> bool:
        """Copy a version, unless it is here; False if it is not finished."""
        target = self.directory / version
        if target.exists():
            return True
        files = self._source.files(version)
        # Before the first becomes a path here.
        _check_files(version, files)
        part = self.directory / f".part-{version}"
        left = sum(files.values()) - sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        # Before the first byte: a disk that fills up harms others, too.
        if left > (room := shutil.disk_usage(self.directory).free):
            raise OSError(errno.ENOSPC, f"no room for the {left} bytes of {version}, {room} are free", str(part))
        for name, nbytes in files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            self._source.fetch(version, name, part / name, nbytes)
        # Renamed when it is whole: the folder's reader takes what has its name for finished.
        if files:
            os.replace(part, target)
        return bool(files)

    def drop(self, number: int | None = None) -> None:
        """Remove the versions up to this one, which have been applied; None: all."""
        # After damage the beginnings of files go as well, or the same bytes would be gone on from.
        if number is None:
            for part in self.directory.glob(".part-*"):
                shutil.rmtree(part, ignore_errors=True)
        for _, found, path in self._folder.found():
            if number is None or found <= number:
                shutil.rmtree(path, ignore_errors=True)


def _anchors(names: list[str]) -> list[int]:
    """Numbers of anchors, in order."""
    return sorted(found[1] for name in names if (found := parse_name(name)) and found[0] == "anchor")


def _check_files(version: str, files: Mapping[str, int]) -> None:
    """Raises ValueError if a path leads elsewhere, or a file is where another one needs a folder."""
    for name in files:
        if not is_file_path(name):
            raise ValueError(f"{version} has a file named {brief(name)}")
        parents = name.split("/")[:-1]
        for end in range(1, len(parents) + 1):
            if (above := "/".join(parents[:end])) in files:
                raise ValueError(f"{version} has a file {brief(above)}, and {brief(name)} below it")
