"""Versions of a model's weights in a folder or an object store: whole checkpoints (anchors), and changes after them.

    anchor-00000012/        safetensors under the model's names, publication.json, manifest.json (last)
    delta-00000013/         rank-0.safetensors ..., of each rank's slices; publication.json (last)

    .publisher              lock of the training that publishes there

Nothing counts before its last file is there. A version names its base by session and number: a trainer that begins
anew in a folder starts a session with an anchor, and changes of one session are never applied to values of another.
Files are read whole, compared with their SHA-256, and only then used; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import xxhash

from zero_strategy.checkpoint.disk import remove, sync, write_file
from zero_strategy.checkpoint.layout import METADATA_KEY
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.storage import RemoteFolder, is_remote
from zero_strategy.comm.delta import Words
from zero_strategy.publish.lock import FolderLock
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_regular
from zero_strategy.runtime.shown import brief, checked_path, shown

RECORD = "publication.json"
MOST_RECORD_BYTES = 256 << 20
"""Of a record; it has a line's worth for each parameter and rank."""
_SUM = "sha256"
_NAME = re.compile(r"(anchor|delta)-(\d{8,15})", re.ASCII)
# No name begins with a dot: such are written under it and then renamed, or are the lock.
_FILE = re.compile(r"(?:[A-Za-z0-9_][\w.\-]*/)*[A-Za-z0-9_][\w.\-]*", re.ASCII)
_MOST_PATH, _MOST_FILE_NAME = 1024, 255


def parse_name(name: str) -> tuple[str, int] | None:
    """Kind and number of a version by the name of its folder; None of any other name.

    A number has eight digits, or more where it needs them, and one spelling only.
    """
    found = _NAME.fullmatch(name)
    if found is None or version_name(found[1], int(found[2])) != name:
        return None
    return found[1], int(found[2])


def is_file_path(path: str) -> bool:
    """True if it can be the path of a file in a version: it leads nowhere else, and is none that is hidden."""
    return (
        len(path) <= _MOST_PATH
        and _FILE.fullmatch(path) is not None
        and all(len(name) <= _MOST_FILE_NAME for name in path.split("/"))
    )


@dataclass(frozen=True)
class Version:
    """Facts about a version, as its `publication.json` holds them.

    Attributes:
        number: Of the version; each is one more than the last.
        session: Random text of the trainer's run.
        step: Optimizer steps taken.
        dtype: Of floating-point values, such as "bfloat16"; "": their own.
        files: Of changes: each file's SHA-256, in hexadecimal.
        digests: Of each rank's values in this version; see `digest_of`.
        slices: Of anchors: [name, first element, elements] of each rank's values.
    """

    number: int
    session: str
    step: int
    dtype: str
    files: dict[str, str]
    digests: list[str]
    slices: list[list[list[Any]]]


def record_of(version: Version) -> bytes:
    """The content of `publication.json`."""
    content = asdict(version)
    return (json.dumps({**content, _SUM: _sum_of(content)}, indent=1) + "\n").encode()


def _sum_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a record's entries: a flipped digit of a number is damage like any other."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> Version:
    """A version's facts.

    Raises:
        FileNotFoundError: If it is not there (any more).
        ValueError: If it is damaged; names it.
    """
    found = next(path.glob(f"*/files/{RECORD}"), path / RECORD)  # in the pieces of a checkpoint in a store
    # Bounded: a server, or somebody in the folder, may give any file.
    return parse_record(read_regular(found, MOST_RECORD_BYTES), str(path / RECORD))


def parse_record(content: bytes, source: str) -> Version:
    """A version's facts from its record.

    Raises:
        ValueError: If it is damaged; names `source`.
    """
    try:
        found: Any = bounded_json.parse(content, source)
        version = Version(**{key: found[key] for key in Version.__dataclass_fields__})
        valid = (
            found[_SUM] == _sum_of(asdict(version))
            and _is_count(version.number)
            and _is_count(version.step)
            and isinstance(version.session, str)
            and isinstance(version.dtype, str)
            and isinstance(version.files, dict)
            and all(re.fullmatch(r"rank-\d+\.safetensors", name, re.ASCII) for name in version.files)
            and all(isinstance(digest, str) for digest in version.files.values())
            and isinstance(version.digests, list)
            and all(isinstance(digest, str) for digest in version.digests)
            and isinstance(version.slices, list)
            and all(isinstance(rank, list) and all(map(_is_slice, rank)) for rank in version.slices)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{shown(source)} is damaged: {type(error).__name__}: {shown(error)}") from None
    if not valid:
        raise ValueError(f"{shown(source)} is damaged: its entries are not what they should be")
    return version


def _is_count(value: object) -> bool:
    # A bool is an int, and the sum of two such numbers fits an int64.
    return type(value) is int and 0 <= value < 1 << 62


def _is_slice(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return isinstance(value[0], str) and _is_count(value[1]) and _is_count(value[2])


class Digest:
    """XXH3-128 of values by key (`name@first element`), which are added in the order of keys."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, key: str, words: Words) -> None:
        """The next values."""
        # The NUL keeps keys and values apart, whatever either of them is.
        self._state.update(key.encode() + b"\0")
        self._state.update(cast(Any, words))

    def text(self) -> str:
        """The hash in hexadecimal."""
        return self._state.hexdigest()


def version_name(kind: str, number: int) -> str:
    """Name of a version's folder; `kind` is "anchor" or "delta"."""
    return f"{kind}-{number:08d}"


def last_file(version: str) -> str:
    """The file that is written last, by which a version counts."""
    return MANIFEST_NAME if version.startswith("anchor") else RECORD


class VersionFolder:
    """The folder as readers see it; see `Directory` for writing.

    Args:
        directory: It.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def anchor(self, number: int) -> Path:
        """The path of an anchor."""
        return self.directory / version_name("anchor", number)

    def delta(self, number: int) -> Path:
        """The path of a change."""
        return self.directory / version_name("delta", number)

    def found(self) -> list[tuple[str, int, Path]]:
        """(kind, number, path) of all, finished or not, in the order of numbers."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        matches = [(match, name) for name in names if (match := parse_name(name))]
        return sorted((*match, self.directory / name) for match, name in matches)

    def finished(self) -> list[tuple[str, int]]:
        """(kind, number) of the finished versions."""
        return [(kind, number) for kind, number, path in self.found() if (path / last_file(path.name)).is_file()]

    def anchors(self) -> list[int]:
        """Numbers of the finished anchors, in order."""
        return [n for kind, n, path in self.found() if kind == "anchor" and (path / MANIFEST_NAME).is_file()]


def missing_change(found: Iterable[tuple[str, int]], number: int) -> str:
    """Words for a change that is lost, with others after it and no anchor; "" where nothing is.

    Args:
        found: (kind, number) of the finished versions.
        number: Of the version from which a reader goes on.
    """
    later = [(kind, each) for kind, each in found if each > number]
    if not later or any(kind == "anchor" for kind, _ in later) or ("delta", number + 1) in later:
        return ""
    names = version_name("delta", number + 1), version_name(*min(later, key=lambda each: each[1]))
    return f"{names[0]} is missing, and {names[1]} is there: version {number} stays until the next anchor"


def payloads_of(content: bytes, source: str) -> Iterator[tuple[str, int, memoryview]]:
    """(name, first element, payload) of each entry in a rank's file of a change.

    Raises:
        ValueError: If it is no such file; names `source`.
    """
    data = memoryview(content)
    start = 8 + int.from_bytes(data[:8], "little")
    if not 10 <= start <= len(data):
        raise ValueError(f"{shown(source)} is damaged: its header does not end within its {len(data)} bytes")
    header = bounded_json.parse(content[8:start], source)
    if not isinstance(header, dict):
        raise ValueError(f"{shown(source)} is damaged: its header is no JSON object")
    for key, entry in header.items():
        if key == METADATA_KEY:
            continue
        name, _, first = key.rpartition("@")
        found: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
        offsets = found if isinstance(found, list) and len(found) == 2 and all(map(_is_count, found)) else [1, 0]
        is_place = name and re.fullmatch(r"\d{1,18}", first, re.ASCII)
        if not is_place or not offsets[0] <= offsets[1] <= len(data) - start:
            raise ValueError(f"{shown(source)} is damaged: its entry {brief(key)} is not what it should be")
        yield name, int(first), data[start + offsets[0] : start + offsets[1]]


def read_delta_file(path: Path, digest: str, most: int) -> bytes:
    """A rank's file of a change, of so many bytes at most.

    Raises:
        FileNotFoundError: If it is not there (any more).
        ValueError: If it is not what was written; names it.
    """
    content = read_regular(path, most)
    # The very bytes that are used next: a second read could give others.
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{shown(path)} is damaged: its {len(content)} bytes are not those that were written")
    return content


class Target(Protocol):
    """A place for versions.

    Attributes:
        where: What users call it.
    """

    where: str

    def lock(self) -> FolderLock | None:
        """Keep other trainings out; None where that cannot be done.

        Raises:
            ValueError: If another one publishes there.
        """

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

    def lock(self) -> FolderLock:
        """See `Target`."""
        return FolderLock(self._folder.directory)

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
        # The ranks' files have lasting names before the record counts them.
        sync(path)
        write_file(path / f".{RECORD}", record_of(version))
        # Written under another name first: a reader never sees a part of it.
        os.replace(path / f".{RECORD}", path / RECORD)
        sync(path)
        # The version's own name, too, or a loss of power leaves a gap that later changes need.
        sync(self._folder.directory)

    def prune(self, keep: int) -> None:
        """See `Target`."""
        anchors = self._folder.anchors()
        # Unfinished ones as well: with an anchor behind them nobody will finish them.
        for _, number, path in self._folder.found() if len(anchors) > keep else ():
            if number < anchors[-keep]:
                # First what makes it count: a reader, or a crash in between, finds no version with files missing.
                (path / last_file(path.name)).unlink(missing_ok=True)
                remove(path)


class Bucket:
    """A folder of an object store, whose objects are there whole or not at all."""

    def __init__(self, url: str) -> None:
        self._folder, self.where = RemoteFolder(url), url

    def lock(self) -> None:
        """See `Target`."""

    def _numbers(self) -> list[tuple[int, str]]:
        matches = [(match, name) for name in self._folder.names() if (match := parse_name(name))]
        return sorted((match[1], name) for match, name in matches)

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
        ValueError: If it is empty, a URL without a place, or of a scheme that cannot be written to.
    """
    url = checked_path(to, "publish(to=...)")
    if not is_remote(to):
        return Directory(to)
    if url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: publish in a directory or an object store, and serve that: publisher.serve()")
    return Bucket(url)
