"""Records of bytes in files that belong to one process: the store of the NVMe tier, and its layout.

    directory 0   | a0 | a2 | b1 |  ...         record a = stripes a0 a1 a2, b = b0 b1
    directory 1   | a1 | b0 |                   consecutive stripes go round the directories

A record begins on a boundary of `alignment` bytes and has whole such units to itself, so that no two records share a
block of the disk. With one directory a record is one piece. It begins where least has been placed so far, or else a
hundred records of less than a stripe would all lie in directory 0.

    with StateFile(["/nvme0", "/nvme1"], {"layers.0": 67_108_864, "norm": 100}) as state:
        state.write("norm", memory).wait()
        reading = state.read("layers.0", other)     # goes on by itself
        ...
        reading.wait()

Nothing here survives the process: a run that was killed resumes from a checkpoint, never from these files. So nothing
is flushed, and no byte of them is worth keeping when the process ends.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from zero_strategy.offload import part_file as ownership
from zero_strategy.offload.file_io import Extent, FileQueue, Kind, Request
from zero_strategy.offload.file_queues import DEFAULT_DEPTH, open_queue
from zero_strategy.offload.part_file import PartFile, RecordChecksums
from zero_strategy.runtime.host_bytes import PAGE


@dataclass(frozen=True)
class Place:
    """Bytes [begin, end) of a record lie at `offset` of the file in directory number `directory`."""

    directory: int
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Record:
    nbytes: int
    first: int
    bases: tuple[int, ...]


class StateLayout:
    """All records of one rank.

    Args:
        records: Name -> logical bytes, 0 or more.
        directories: How many there are.
        alignment: Of the beginnings of records, in bytes.
        stripe_bytes: A multiple of the alignment.

    Attributes:
        sizes: Bytes of the file in each directory.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, records: Mapping[str, int], directories: int, alignment: int, stripe_bytes: int) -> None:
        if stripe_bytes <= 0 or stripe_bytes % alignment:
            raise ValueError(f"stripe_bytes must be a positive multiple of {alignment}, got {stripe_bytes}")
        self.alignment, self._directories, self._stripe = alignment, directories, stripe_bytes
        self._records: dict[str, _Record] = {}
        sizes = [0] * directories
        for name, nbytes in records.items():
            if nbytes < 0:
                raise ValueError(f"record {name!r} cannot have {nbytes} bytes")
            record = _Record(nbytes, sizes.index(min(sizes)), tuple(sizes))
            self._records[name] = record
            whole, rest = divmod(self.padded(nbytes), stripe_bytes)
            for step in range(directories):
                stripes = whole // directories + (step < whole % directories)
                last = rest if step == whole % directories else 0
                sizes[(record.first + step) % directories] += stripes * stripe_bytes + last
        self.sizes = tuple(sizes)

    def padded(self, nbytes: int) -> int:
        """Bytes that so many bytes take up."""
        return -(-nbytes // self.alignment) * self.alignment

    def places(self, name: str, start: int, stop: int) -> list[Place]:
        """Ranges of bytes [start, stop) of a record, in their order; `stop` may be in the padding."""
        record, found = self._records[name], []
        stripe = self._stripe if self._directories > 1 else max(self.padded(record.nbytes), 1)
        while start < stop:
            number, within = divmod(start, stripe)
            end = min(stop, (number + 1) * stripe)
            row, step = divmod(number, self._directories)
            directory = (record.first + step) % self._directories
            found.append(Place(directory, record.bases[directory] + row * stripe + within, start, end))
            start = end
        return found


DEFAULT_STRIPE_BYTES = 4 << 20


class PartialRecordError(RuntimeError):
    """A record has bytes of two states, for something stopped a change half-way."""


class Transfer:
    """A read or a write of a record. Its memory must stay, and stay as it is, until `wait` returns."""

    def __init__(self, state: StateFile, request: Request, name: str, start: int, memory: Tensor) -> None:
        self.name, self.start, self.memory = name, start, memory
        self._state, self._request = state, request
        self._error: Exception | None = None
        self._settled = False

    @property
    def kind(self) -> Kind:
        """ "read" or "write"."""
        return self._request.kind

    @property
    def stop(self) -> int:
        """End of it in the record."""
        return self.start + self.memory.numel()

    def done(self) -> bool:
        """True if `wait` would return, or raise, at once."""
        return self._request.done()

    def wait(self, lock: AbstractContextManager[object] | None = None) -> None:
        """Returns when all bytes have moved.

        Args:
            lock: Where threads share the file: what they hold while they use it. It is not held while bytes move.

        Raises:
            OSError: If they could not be; with the path, the byte offset, the bytes, the cause and the record.
            TimeoutError: If the drive has answered nothing for `stall_seconds`; the transfer is still under way.
            CorruptRecordError: If checksums are on, and a read has found other bytes than were written.
        """
        if not self._settled:
            error = self._moved()
            with lock or contextlib.nullcontext():
                self._settle(error)
        if self._error is not None:
            raise self._error

    def _moved(self) -> OSError | None:
        try:
            self._request.wait()
        except TimeoutError:
            # An OSError as well, but the transfer is still under way: nothing is settled, and a later wait may end.
            raise
        except OSError as error:
            return OSError(error.errno, f"{error.strerror} (record {self.name!r})", error.filename)
        return None

    def _settle(self, error: Exception | None) -> None:
        if self._settled:  # by another thread that waited for it
            return
        self._settled, self._error = True, error
        try:
            self._state._settle(self, error)
        except RuntimeError as corrupt:
            self._error = corrupt


class StateFile:
    """One preallocated file per directory, with records under names. For one thread at a time.

    A record that was never written reads as zeros. Transfers of the same bytes happen in the order in which they were
    asked for: one that would meet another one under way waits for it first.

    Args:
        directories: One or several, made if need be; records are divided among several in stripes.
        records: Name -> bytes, any number, 0 too.
        queue: Moves the bytes, and stays open; default: one of the file's own.
        label: What the state is of, for the file's name: a run or an engine.
        rank: Of this process, for the file's name.
        stripe_bytes: Bytes in one directory before the next one's turn.
        checksums: Notice records whose bytes have changed on the drive; costs a pass over each record.
        keep_name: Leave the names in the directories while the files are in use (see `part_file.py`).

    Attributes:
        paths: Where the files are, or were before their names went.
        direct: For each directory, whether its file is read and written past the page cache.
        alignment: Ranges of a record begin at multiples of this, in bytes.
        nbytes: Of all records.
        disk_nbytes: Reserved in each directory.
        removed: Stale files of dead processes that were found in the directories and removed.

    Raises:
        ValueError: If there is no directory, or one twice, or a size is negative.
        OSError: If there is not enough space, with bytes needed and bytes free, or a file cannot be made.
    """

    def __init__(
        self,
        directories: str | Path | Sequence[str | Path],
        records: Mapping[str, int],
        *,
        queue: FileQueue | None = None,
        label: str = "state",
        rank: int = 0,
        stripe_bytes: int = DEFAULT_STRIPE_BYTES,
        checksums: bool = False,
        keep_name: bool = False,
    ) -> None:
        places = _directories(directories)
        self._sizes = dict(records)
        self._parts: list[PartFile] = []
        self._partially_applied: dict[str, str] = {}
        self._mended: dict[str, int] = {}
        self._under_way: dict[str, list[Transfer]] = {}
        self._requests: set[Request] = set()
        self._checksums = RecordChecksums() if checksums else None
        self._closed = False
        self.removed: list[Path] = []
        # Whatever fails, files that were made in other directories go again.
        with contextlib.ExitStack() as undo:
            for place in places:
                place.mkdir(parents=True, exist_ok=True)
                # First, since files of a killed run may hold the room that is needed.
                self.removed += ownership.remove_stale(place)
                part = PartFile(place, ownership.new_name(label, rank), keep_name=keep_name)
                undo.callback(part.close)
                self._parts.append(part)
            # The layout takes the largest alignment of all directories, so all files are open before space is taken.
            self.alignment = max(PAGE, *(part.alignment for part in self._parts))
            self._layout = StateLayout(records, len(places), self.alignment, stripe_bytes)
            for part, nbytes in zip(self._parts, self._layout.sizes, strict=True):
                part.reserve(nbytes)
            # Last, as nothing behind it fails and would leave its threads.
            self.queue = queue or open_queue(depth=DEFAULT_DEPTH * len(places))
            self._owns_queue = queue is None
            undo.pop_all()
        # It holds parts and queue, but not this object: what is under way ends before descriptors are closed, always.
        local = self.queue if queue is None else None
        self._finalizer = weakref.finalize(self, _close_abandoned, local, self._requests, self._parts, os.getpid())
        self.paths = [part.path for part in self._parts]
        self.direct = [part.rules is not None for part in self._parts]
        self.nbytes, self.disk_nbytes = sum(records.values()), self._layout.sizes

    @property
    def records(self) -> Mapping[str, int]:
        """Name -> bytes."""
        return self._sizes

    @property
    def partially_applied(self) -> Mapping[str, str]:
        """Records that cannot be read until they have been written anew from end to end -> why."""
        return self._partially_applied

    def nbytes_of(self, name: str) -> int:
        """Bytes of a record.

        Raises:
            ValueError: If there is none of this name.
        """
        if name not in self._sizes:
            near = get_close_matches(name, self._sizes, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"there is no record {name!r} in {self._where()}{hint}")
        return self._sizes[name]

    def read(self, name: str, memory: Tensor, start: int = 0) -> Transfer:
        """Begins to fill memory from byte `start` of a record.

        Args:
            name: The record.
            memory: Contiguous, on the CPU, any dtype. It covers bytes of the record, or goes beyond its end exactly as
                far as the next multiple of `alignment`, which saves a second, smaller transfer for the last page. On a
                page boundary it is filled past the page cache, elsewhere through it.
            start: A multiple of `alignment`.

        Raises:
            ValueError: If the range is not one.
            PartialRecordError: If the record is partially written.
        """
        flat = self._range(name, memory, start)
        # First: a write under way may yet fail, or may be the one that mends the record.
        self._settle_before("read", name, start, start + flat.numel())
        if name in self._partially_applied:
            raise PartialRecordError(
                f"record {name!r} in {self._where()} is partially written: {self._partially_applied[name]}; load a "
                "checkpoint, which writes all records anew"
            )
        return self._begin("read", name, flat, start)

    def write(self, name: str, memory: Tensor, start: int = 0) -> Transfer:
        """Begins to write memory to a record from byte `start` on.

        Args:
            name, memory, start: As for `read`; besides, the range must end at a multiple of `alignment` or with the
                record. What memory has beyond the record's end is written into the padding and means nothing.

        Raises:
            ValueError: If the range is not one.
        """
        flat = self._range(name, memory, start)
        stop = start + flat.numel()
        if stop % self.alignment and stop != self._sizes[name]:
            raise ValueError(
                f"record {name!r}: a write must end at a multiple of {self.alignment} bytes or at the record's end, "
                f"{self._sizes[name]}, not at {stop}"
            )
        self._settle_before("write", name, start, stop)
        if self._checksums is not None:
            # After the reads that were under way, which are compared with what they were to find.
            self._checksums.note(name, start, flat[: self._sizes[name] - start])
        return self._begin("write", name, flat, start)

    def meeting(self, kind: Kind, name: str, start: int, stop: int) -> list[Transfer]:
        """Requests under way that must be over before bytes [start, stop) of a record are read or written.

        `read` and `write` wait for it by themselves. A file that threads share would be locked meanwhile.
        """
        return [
            other
            for other in self._under_way.get(name, [])
            if "write" in (kind, other.kind) and other.start < stop and start < other.stop
        ]

    def mark_partially_applied(self, names: Sequence[str], reason: str) -> None:
        """Says that records have bytes of two states: they are refused until written anew from beginning to end."""
        for name in names:
            self.nbytes_of(name)
            self._partially_applied[name] = reason
            self._mended.pop(name, None)  # parts that were written before are no longer good

    def drain(self) -> None:
        """Waits for all that is under way; raises the first error."""
        self._settle_all(raising=True)

    def close(self, lock: AbstractContextManager[object] | None = None) -> None:
        """Waits for all that is under way, and lets the files go. A second call does nothing.

        Args:
            lock: As for `Transfer.wait`, where other threads may wait for transfers; they begin none any more.

        Raises:
            OSError: The first error of what was under way; everything is closed all the same.
            TimeoutError: If the drive does not answer; the files then go with the process.
        """
        self._close(cancel=False, lock=lock)

    def _close(self, *, cancel: bool, lock: AbstractContextManager[object] | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)
            try:
                # A queue of its own is cancelled as a whole; in one of others, this file's transfers come to their end.
                if not (cancel and self._owns_queue):
                    self._settle_all(raising=not cancel, lock=lock)
                if self._owns_queue:
                    self.queue.close(cancel=cancel)
            except TimeoutError:
                stack.pop_all()  # descriptors that are in use are not closed: their numbers would be given out again
                raise

    def _begin(self, kind: Kind, name: str, flat: Tensor, start: int) -> Transfer:
        extents: list[Extent] = []
        for place in self._layout.places(name, start, start + flat.numel()):
            part = flat[place.begin - start : place.end - start]
            extents += self._parts[place.directory].extents(part, place.offset)
        request = self.queue.submit(kind, extents)
        self._requests.add(request)
        transfer = Transfer(self, request, name, start, flat)
        self._under_way.setdefault(name, []).append(transfer)
        return transfer

    def _range(self, name: str, memory: Tensor, start: int) -> Tensor:
        if self._closed:
            raise ValueError(f"{self._where()} is closed")
        nbytes = self.nbytes_of(name)
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(f"record {name!r}: memory must be contiguous and on the CPU, not on {memory.device}")
        flat = memory.detach().reshape(-1).view(torch.uint8)
        stop = start + flat.numel()
        if start < 0 or start % self.alignment or not (stop <= nbytes or stop == self._layout.padded(nbytes)):
            raise ValueError(
                f"bytes {start} to {stop} are no range of record {name!r}, which has {nbytes} bytes (with padding "
                f"{self._layout.padded(nbytes)}): a range begins at a multiple of {self.alignment}"
            )
        return flat

    def _settle_before(self, kind: Kind, name: str, start: int, stop: int) -> None:
        """Waits for transfers that must not meet the one to come. Their errors are theirs to tell."""
        for other in self.meeting(kind, name, start, stop):
            outcome_of(other)

    def _settle_all(self, *, raising: bool, lock: AbstractContextManager[object] | None = None) -> None:
        with lock or contextlib.nullcontext():
            under_way = [one for ones in self._under_way.values() for one in ones]
        errors = [outcome_of(one, lock) for one in under_way]
        for error in errors:
            if error is not None and raising:
                raise error

    def _settle(self, transfer: Transfer, error: Exception | None) -> None:
        """Takes note that a transfer is over; raises CorruptRecordError."""
        name = transfer.name
        self._requests.discard(transfer._request)
        self._under_way[name].remove(transfer)
        if not self._under_way[name]:
            del self._under_way[name]
        if transfer.kind == "write":
            self._written(transfer, error)
        elif error is None and self._checksums is not None:
            logical = transfer.memory[: self._sizes[name] - transfer.start]
            self._checksums.check(name, transfer.start, logical, self._where())

    def _written(self, transfer: Transfer, error: Exception | None) -> None:
        name = transfer.name
        if error is not None:
            self.mark_partially_applied([name], f"a write failed: {error}")
        # Mended without a gap from its first byte on; what is written beyond one does not count.
        elif name in self._partially_applied and transfer.start <= self._mended.get(name, 0):
            self._mended[name] = max(self._mended.get(name, 0), transfer.stop)
            if self._mended[name] >= self._sizes[name]:
                del self._partially_applied[name], self._mended[name]

    def _where(self) -> str:
        return ", ".join(str(part.path) for part in self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close(cancel=False)
        else:
            with contextlib.suppress(OSError):  # what is being raised already matters more
                self._close(cancel=True)


def _close_abandoned(queue: FileQueue | None, requests: set[Request], parts: list[PartFile], process: int) -> None:
    """Close a file that nobody has closed."""
    if os.getpid() != process:
        return
    try:
        if queue is not None:
            queue.close(cancel=True)
        # A queue of somebody else's stays open: only this file's own requests are waited for.
        for request in requests if queue is None else ():
            with contextlib.suppress(OSError):
                request.wait()
                continue
            if not request.done():  # a silent drive: the descriptors stay in use
                return
    except TimeoutError:
        return
    for part in parts:
        part.close()


def outcome_of(transfer: Transfer, lock: AbstractContextManager[object] | None = None) -> Exception | None:
    """Waits; returns its error, but raises if the drive does not answer."""
    try:
        transfer.wait(lock)
    except TimeoutError:
        raise
    except (OSError, RuntimeError) as error:
        return error
    return None


def _directories(given: str | Path | Sequence[str | Path]) -> list[Path]:
    several = [given] if isinstance(given, (str, Path)) else list(given)
    found = [Path(os.path.abspath(path)) for path in several]
    if not found:
        raise ValueError("a state file needs at least one directory (offload.nvme_path)")
    for path in found:
        if found.count(path) > 1:
            raise ValueError(f"{path} is named twice among the directories (offload.nvme_path)")
    return found
