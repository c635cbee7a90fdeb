"""The file of a journal: records that are appended, each with its length and a checksum.

    RUN_DIR/journal-0.bin      one file per rank

    frame     "ZJ", kind, version, length of the payload (uint32), CRC-32 of kind and payload (uint32), payload
    H         JSON: what a session of the run is (config, ranks, units, versions, ...)
    P         JSON: hyper-parameters that are others than in the step before
    S         a step: its slots, and for each line (a unit, or some) digests of outputs and of reduced gradients
    W         weights after a step: a digest for each line

All numbers are little-endian. A record is written by one call, so that a process that is killed leaves at most one that
is cut off, at the end: readers pass over it, and a run that goes on removes it. Other damage is an error.

What a rank writes of a step is bounded by `MOST_BYTES`, hyper-parameters that change apart: slots beyond `MOST_GROUPS`
are folded, so that slot s is in group s div fold, and so are units beyond the room that is left, neighbours together.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_regular
from zero_strategy.runtime.shown import shown

MAGIC, VERSION = b"ZJ", 1
MOST_BYTES = 1024
MOST_GROUPS = 16
_MOST_PAYLOAD = 64 << 20
_MOST_FILE = 8 << 30
_HYPER_BYTES = 96
"""Room for hyper-parameters that a schedule changes."""

_FRAME = struct.Struct("<2sBBII")
_STEP = struct.Struct("<qdQdBBHH")
_GROUP = struct.Struct("<HHQIIII")
_LINE = struct.Struct("<IQ")
_WEIGHTS = struct.Struct("<qH")
_WEIGHT = struct.Struct("<Q")


def journal_path(directory: Path, rank: int) -> Path:
    """The file of a rank in a run's directory."""
    return directory / f"journal-{rank}.bin"


def folded_by(slots: int) -> int:
    """Slots of a group."""
    return -(-slots // MOST_GROUPS)


def most_lines(slots: int) -> int:
    """Lines for which a step's records have room."""
    groups = -(-slots // folded_by(slots)) * _GROUP.size
    rest = MOST_BYTES - _HYPER_BYTES - 3 * _FRAME.size - _STEP.size - _WEIGHTS.size - groups
    return rest // (_LINE.size + _WEIGHT.size)


@dataclass(frozen=True)
class SlotEntry:
    """A group of slots, or those of it that one rank computed; digests of several are sums.

    Attributes:
        group: Slot div fold.
        slots: How many of it.
        loss: Sum of the bits of the losses, as float64, modulo 2^64; of one slot its loss. 0: nobody told it.
        inputs: Digest of what the module's forward was called with.
        batch: Digest of what the integration or the script said that it computes with; 0: nothing.
        stream: Digest of the generators when the slot was over.
        output: Digest of a sample of what the module's forward returned.
    """

    group: int
    slots: int
    loss: int
    inputs: int
    batch: int
    stream: int
    output: int

    def __add__(self, other: SlotEntry) -> SlotEntry:
        assert self.group == other.group
        low = ((a + b) & 0xFFFFFFFF for a, b in zip(self._short(), other._short(), strict=True))
        return SlotEntry(self.group, self.slots + other.slots, (self.loss + other.loss) & (1 << 64) - 1, *low)

    def _short(self) -> tuple[int, ...]:
        return self.inputs, self.batch, self.stream, self.output

    @property
    def loss_value(self) -> float | None:
        """The loss; None where it is not known, or those of several slots were added up."""
        return struct.unpack("<d", struct.pack("<Q", self.loss))[0] if self.slots == 1 and self.loss else None


CLIPS = ("", "norm", "value")
"""What was done to gradients."""


@dataclass(frozen=True)
class StepEntry:
    """A step of one rank.

    Attributes:
        step: Steps taken and skipped before it.
        norm: Of the gradients, before they were scaled; None: nobody asked for it.
        hyper: Digest of the optimizers' hyper-parameters.
        clip: One of `CLIPS`.
        bound: Of the clip.
        partly: It was for some parameters only.
        skipped: The step was not taken.
        slots: This rank's.
        forward: By line, digest of samples of the units' outputs, of this rank's slots, modulo 2^32.
        gradients: By line, digest of this rank's part of the reduced gradients.
    """

    step: int
    norm: float | None
    hyper: int
    clip: str = ""
    bound: float = 0.0
    partly: bool = False
    skipped: bool = False
    slots: tuple[SlotEntry, ...] = ()
    forward: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """For a record S."""
        norm, flags = math.nan if self.norm is None else self.norm, 0
        for bit, is_set in enumerate((self.norm is not None, self.skipped, self.partly)):
            flags |= int(is_set) << bit
        counts = len(self.slots), len(self.forward)
        parts = [_STEP.pack(self.step, norm, self.hyper, self.bound, CLIPS.index(self.clip), flags, *counts)]
        parts += [_GROUP.pack(s.group, s.slots, s.loss, s.inputs, s.batch, s.stream, s.output) for s in self.slots]
        parts += [_LINE.pack(*both) for both in zip(self.forward, self.gradients, strict=True)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, payload: bytes) -> StepEntry:
        """The step of a record S.

        Raises:
            struct.error, IndexError: If it is none.
        """
        step, norm, hyper, bound, clip, flags, groups, lines = _STEP.unpack_from(payload)
        at = _STEP.size
        slots = tuple(SlotEntry(*_GROUP.unpack_from(payload, at + i * _GROUP.size)) for i in range(groups))
        at += groups * _GROUP.size
        both = [_LINE.unpack_from(payload, at + i * _LINE.size) for i in range(lines)]
        forward, gradients = tuple(f for f, _ in both), tuple(g for _, g in both)
        told = norm if flags & 1 else None
        return cls(step, told, hyper, CLIPS[clip], bound, bool(flags & 4), bool(flags & 2), slots, forward, gradients)


@dataclass
class Session:
    """Records of one rank of a session of a run: from a start, or a resume, to its end.

    Attributes:
        header: See `journal.header_of`.
        steps: By number; of one that was taken again the last.
        weights: After a step, by its number; by line.
        hyper: Changes of hyper-parameters with a step.
        first: Number of its first step that counts; None: there is none yet.
    """

    header: Mapping[str, Any]
    steps: dict[int, StepEntry] = field(default_factory=dict)
    weights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    hyper: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    first: int | None = None

    def take(self, entry: StepEntry) -> None:
        """Add a step; one that is no later than those there takes their place, as after a load."""
        self.drop_from(entry.step)
        self.steps[entry.step] = entry
        self.first = entry.step if self.first is None else min(self.first, entry.step)

    def drop_from(self, step: int) -> None:
        """Forget a step and all after it; hyper-parameters of the step stay, which are written before it."""
        for number in [number for number in self.steps if number >= step]:
            del self.steps[number]
        for number in [number for number in self.weights if number >= step]:
            del self.weights[number]
        for number in [number for number in self.hyper if number > step]:
            del self.hyper[number]


def frame(kind: bytes, payload: bytes) -> bytes:
    """A record."""
    return _FRAME.pack(MAGIC, kind[0], VERSION, len(payload), zlib.crc32(kind + payload)) + payload


def pack_json(value: Mapping[str, Any]) -> bytes:
    """The payload of a record H or P."""
    return json.dumps(value, separators=(",", ":"), allow_nan=True).encode()


def pack_weights(step: int, lines: tuple[int, ...]) -> bytes:
    """The payload of a record W."""
    return _WEIGHTS.pack(step, len(lines)) + b"".join(_WEIGHT.pack(line) for line in lines)


def records(content: bytes, source: str) -> Iterator[tuple[bytes, bytes, int]]:
    """The kind, the payload and the end of each whole record.

    Args:
        content: Of a file.
        source: Its name, for errors.

    Raises:
        ValueError: If a record is damaged, unless it is cut off at the end; names the file and the byte.
    """
    at = 0
    while at < len(content):
        if at + _FRAME.size > len(content) and content[at : at + 2] == MAGIC[: len(content) - at]:
            return
        where = f"{shown(source)}, byte {at}"
        if content[at : at + 2] != MAGIC:
            raise ValueError(f"{where}: damaged: no record of a journal begins here")
        _, number, version, length, checksum = _FRAME.unpack_from(content, at)
        if version != VERSION:
            raise ValueError(f"{where}: a journal of version {version}, and this release reads {VERSION}")
        stop = at + _FRAME.size + length
        if length > _MOST_PAYLOAD:
            raise ValueError(f"{where}: damaged: a record of {length} bytes")
        if stop > len(content):
            return
        kind, payload = bytes([number]), content[at + _FRAME.size : stop]
        if zlib.crc32(kind + payload) != checksum:
            if stop == len(content):
                return
            raise ValueError(f"{where}: damaged: the checksum of a record does not fit")
        yield kind, payload, stop
        at = stop


def read_sessions(path: str | os.PathLike[str]) -> list[Session]:
    """The sessions of a rank's file, in order; one that another has gone back behind keeps what was before.

    Raises:
        ValueError: If it is damaged, or no journal; names the file and the byte.
        OSError: If it cannot be read.
    """
    source = os.fspath(path)
    found: list[Session] = []
    for kind, payload, stop in records(read_regular(path, _MOST_FILE), source):
        where = f"{source}, byte {stop - len(payload)}"
        try:
            _take(found, kind, payload, where)
        except (struct.error, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{shown(where)}: damaged: {error}") from error
    return found


def _take(found: list[Session], kind: bytes, payload: bytes, where: str) -> None:
    if kind == b"H":
        header = bounded_json.parse(payload, where)
        if not isinstance(header, dict):
            raise TypeError("the header is no object")
        found.append(Session(header))
        return
    if not found:
        raise ValueError(f"{shown(where)}: damaged: a step before any header")
    session = found[-1]
    if kind == b"S":
        entry = StepEntry.unpack(payload)
        for earlier in found[:-1]:
            earlier.drop_from(entry.step)
        session.take(entry)
    elif kind == b"W":
        step, count = _WEIGHTS.unpack_from(payload)
        session.weights[step] = struct.unpack_from(f"<{count}Q", payload, _WEIGHTS.size)
    elif kind == b"P":
        values = bounded_json.parse(payload, where)
        session.hyper[int(values["step"])] = dict(values["changes"])
    # Other kinds are of later releases.


class JournalWriter:
    """Appends records to the file of a rank.

    Args:
        path: The file; a record that is cut off at its end is removed.

    Raises:
        ValueError: If what is there is damaged, or no journal.
        OSError: If it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        ends = (stop for _, _, stop in records(read_regular(path, _MOST_FILE), str(path))) if path.exists() else ()
        whole = max(ends, default=0)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def write(self, kind: bytes, payload: bytes) -> int:
        """Append a record; returns its bytes."""
        record = frame(kind, payload)
        done = os.write(self._file, record)
        while done < len(record):  # a signal, or a disk that is nearly full
            done += os.write(self._file, record[done:])
        return len(record)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
