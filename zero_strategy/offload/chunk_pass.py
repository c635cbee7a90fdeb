"""A pass over chunks: the next ones are read and the last ones written while one is worked on.

    elements  |------------- head -------------|-------------- the rest --------------|
    chunks    |-- 0 --|-- 1 --|-- 2 --|-- 3 ---|-- 4 --|-- 5 --|-- 6 --|-- 7 --|- 8 --|

The head is what `offload.optimizer_ratio` leaves on the device; a chunk lies in the head or in the rest, never in both.

    read       chunk i+1, i+2 -->  [slot][slot]
    work on    chunk i             [slot]
    write      chunk i-1, i-2 <--  [slot][slot]

Memory is that of the slots, whatever the number of chunks; a chunk that is resident is worked on where it lies. A pass
that fails leaves chunks of two states, which are marked partially applied: their
tier refuses them until they are written anew.

The first chunks of a pass to come may be read before it (`read_ahead`), as many as there are slots. Whether they still
are what was read is told by the versions of their vectors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from zero_strategy.offload.tier import PendingIO, Tier, wait_all

ALIGNMENT = 64
"""Elements that a head is a multiple of, so that what is updated on the host begins at a cache line in every dtype."""


@dataclass(frozen=True)
class Cuts:
    """Cuts of vectors of one length.

    Attributes:
        numel: Elements.
        size: Elements of a chunk; the last ones of head and rest may have fewer.
        head: Elements of the head.
    """

    numel: int
    size: int
    head: int = 0

    def __post_init__(self) -> None:
        assert self.size > 0 and 0 <= self.head <= self.numel

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of every chunk."""
        return [
            (start, min(start + self.size, stop))
            for begin, stop in ((0, self.head), (self.head, self.numel))
            for start in range(begin, stop, self.size)
        ]

    @property
    def heads(self) -> int:
        """Chunks of the head."""
        return -(-self.head // self.size)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Chunks that hold elements [start, stop): number, first and one-past-last of them, first of the chunk."""
        assert 0 <= start <= stop <= self.numel
        number = self._number(start)
        while start < stop:
            begin, end = self.chunks[number]
            yield number, start, min(stop, end), begin
            start, number = end, number + 1

    def _number(self, element: int) -> int:
        if element < self.head:
            return element // self.size
        return self.heads + (element - self.head) // self.size


def head_numel(numel: int, ratio: float) -> int:
    """Elements of `numel` that stay on the device where `ratio` of them shall not: a multiple of `ALIGNMENT`."""
    return numel if ratio == 0 else min(numel, int(numel * (1.0 - ratio)) // ALIGNMENT * ALIGNMENT)


class ChunkedVector(Protocol):
    """A vector as a pass over its chunks sees it; see `OffloadedVector`."""

    dtype: torch.dtype
    fill: float
    cuts: Cuts
    written: list[bool]
    version: int

    @property
    def tier(self) -> Tier: ...

    def is_resident(self, number: int) -> bool: ...

    def resident(self, number: int, *, filled: bool = True) -> Tensor | None: ...

    def record(self, number: int) -> str: ...

    def target(self, number: int) -> str: ...

    def wrote(self, number: int) -> None: ...

    def mark_partially_applied(self, number: int, why: str) -> None: ...


V = TypeVar("V", bound=ChunkedVector)


@dataclass
class Chunk(Generic[V]):
    """Elements [start, stop) of vectors that are cut alike.

    Attributes:
        number: Of the chunk, in each vector.
        start, stop: Its elements.
        vectors: By key.
        unread: Keys whose old values nobody needs.
        unchanged: Keys that are not written back.
    """

    number: int
    start: int
    stop: int
    vectors: Mapping[str, V]
    unread: frozenset[str] = frozenset()
    unchanged: frozenset[str] = frozenset()


@dataclass
class _ReadAhead:
    """A chunk that is being read before its pass.

    Attributes:
        chunk: The chunk.
        pending: Its reads.
        known: By key: which record of which version of the vector is read.
    """

    chunk: Chunk[Any]
    pending: list[PendingIO]
    known: dict[str, tuple[ChunkedVector, str, int]]

    def serves(self, chunk: Chunk[Any]) -> bool:
        """True if this is what a pass over `chunk` would read now, but for keys that it leaves unchanged."""
        return chunk.number == self.chunk.number and self.known == _what_to_read(chunk)


class ChunkSlots:
    """Memory for the chunks that a pass has under way. One pass at a time.

    Args:
        count: Slots: one is worked on, half of the others are being filled, half written.

    Attributes:
        failure: What could not be read ahead, until somebody is told.
    """

    def __init__(self, count: int) -> None:
        assert count > 0
        self._slots: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self._ahead = count // 2
        self._writes: dict[int, tuple[Chunk[Any], list[PendingIO]]] = {}
        self._early: list[_ReadAhead] = []
        self.failure: OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that have been taken."""
        return sum(memory.numel() for slot in self._slots for memory in slot.values())

    def read_ahead(self, chunks: Sequence[Chunk[Any]]) -> None:
        """Begin to read the first of these chunks, what a pass leaves unchanged apart: it may change before the pass.

        Raises:
            OSError: If the tier fails, or has failed to write what was in the slots; PartialRecordError.
        """
        wanted = chunks[: len(self._slots)]
        if len(self._early) == len(wanted) and all(map(_ReadAhead.serves, self._early, wanted)):
            return  # several backwards before one step, or one that was skipped
        self.forget_ahead()
        try:
            for slot, chunk in enumerate(wanted):
                self._settle_slot(slot)
                begun = _ReadAhead(chunk, [], _what_to_read(chunk))
                self._early.append(begun)
                self._read(chunk, slot, begun.pending, chunk.vectors.keys() - chunk.unchanged)
        except BaseException:
            self.forget_ahead()
            raise

    def check_ahead(self, chunks: Sequence[Chunk[Any]]) -> None:
        """Forget what was read ahead that is not what a pass over these chunks would read now."""
        for index, (early, chunk) in enumerate(zip(self._early, chunks, strict=False)):
            if not early.serves(chunk):
                self.forget_ahead(index)
                return
        self.forget_ahead(len(chunks))

    def forget_ahead(self, first: int = 0) -> None:
        """Wait for the reads of chunks from this one on, and forget them."""
        self._early, dropped = self._early[:first], self._early[first:]
        with contextlib.suppress(Exception):  # nobody wants them
            wait_all([pending for each in dropped for pending in each.pending])

    def tell_failure(self) -> None:
        """Raise what could not be read ahead, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def run(
        self,
        chunks: Sequence[Chunk[Any]],
        work: Callable[[Chunk[Any], dict[str, Tensor]], object],
        *,
        wait: bool = True,
    ) -> None:
        """Works on each chunk.

        Args:
            chunks: In this order; those that were read ahead first (`check_ahead`).
            work: Takes a chunk and its part of every vector, in memory, and changes it in place.
            wait: Return when all is written; else `settle` does, or the next pass.

        Raises:
            OSError: If the tier fails; what `work` raises.
        """
        early, self._early = self._early, []
        count, reads, begun = len(self._slots), {index: each.pending for index, each in enumerate(early)}, False
        try:
            for index, chunk in enumerate(chunks):
                last = min(index + self._ahead, len(chunks) - 1)
                for ahead in range(index + self._ahead if index else 0, last + 1):
                    there = ahead < len(early)
                    if not there:
                        self._settle_slot(ahead % count)
                    keys = chunks[ahead].unchanged if there else chunks[ahead].vectors.keys()
                    self._read(chunks[ahead], ahead % count, reads.setdefault(ahead, []), keys)
                wait_all(reads.pop(index))
                begun = True
                work(chunk, self._held(chunk, index % count))
                self._write(chunk, index % count)
            if wait:
                self.settle()
        except BaseException as error:
            # What is being raised matters more. Nothing stays under way: a write that ended later would be taken for
            # one that mends what is partially applied, and a read would come into memory of the next pass.
            with contextlib.suppress(Exception):
                wait_all([pending for part in reads.values() for pending in part])
            with contextlib.suppress(Exception):
                self.settle()
            if begun:
                _mark_partially_applied(chunks, error)
            raise

    def settle(self) -> None:
        """Waits for all that is being written, also where some of it fails.

        Raises:
            OSError: If the tier has failed.
        """
        error: BaseException | None = None
        for slot in list(self._writes):
            try:
                self._settle_slot(slot)
            except BaseException as caught:
                error = error or caught
        if error is not None:
            raise error

    def _settle_slot(self, slot: int) -> None:
        if slot not in self._writes:
            return
        chunk, pending = self._writes.pop(slot)
        try:
            wait_all(pending)
        except BaseException as error:
            _mark_partially_applied([chunk], error)
            raise

    def _memory(self, chunk: Chunk[Any], slot: int, key: str) -> Tensor:
        """The slot's memory for a vector's chunk, as bytes."""
        vector, known = chunk.vectors[key], self._slots[slot].get(key)
        wanted = vector.cuts.size * vector.dtype.itemsize  # of a whole chunk, so that it serves for all of this dtype
        if known is None or known.numel() < wanted:
            self._slots[slot][key] = known = vector.tier.staging(wanted)
        return known[: (chunk.stop - chunk.start) * vector.dtype.itemsize]

    def _read(self, chunk: Chunk[Any], slot: int, pending: list[PendingIO], keys: Collection[str]) -> None:
        """Begins to read; what is under way is in `pending`, also where the next read raises."""
        for key, vector in chunk.vectors.items():
            if key not in keys or vector.is_resident(chunk.number):
                continue
            memory = self._memory(chunk, slot, key)
            if key in chunk.unread:
                continue
            if vector.written[chunk.number]:
                pending.append(vector.tier.read(vector.record(chunk.number), memory))
            else:
                memory.view(vector.dtype).fill_(vector.fill)

    def _write(self, chunk: Chunk[Any], slot: int) -> None:
        pending: list[PendingIO] = []
        self._writes[slot] = chunk, pending
        for key, vector in chunk.vectors.items():
            if key in chunk.unchanged or vector.is_resident(chunk.number):
                continue
            pending.append(vector.tier.write(vector.target(chunk.number), self._memory(chunk, slot, key)))
            vector.wrote(chunk.number)

    def _held(self, chunk: Chunk[Any], slot: int) -> dict[str, Tensor]:
        """The chunk's part of every vector, in memory."""
        found = {}
        for key, vector in chunk.vectors.items():
            resident = vector.resident(chunk.number, filled=key not in chunk.unread)
            if resident is None:
                found[key] = self._memory(chunk, slot, key).view(vector.dtype)
            else:
                found[key] = resident
        return found


def cause_of(error: BaseException) -> str:
    """An error in words, for whoever meets what it left behind before he meets the error: other ranks, a next step."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _what_to_read(chunk: Chunk[Any]) -> dict[str, tuple[ChunkedVector, str, int]]:
    """By key, those apart that a pass leaves unchanged: the vector, the record and the version that it would read."""
    return {
        key: (vector, vector.record(chunk.number), vector.version)
        for key, vector in chunk.vectors.items()
        if key not in chunk.unchanged
    }


def _mark_partially_applied(chunks: Sequence[Chunk[Any]], cause: BaseException) -> None:
    for chunk in chunks:
        for key, vector in chunk.vectors.items():
            if key not in chunk.unchanged:
                vector.mark_partially_applied(chunk.number, f"a pass over it stopped half-way ({cause_of(cause)})")
