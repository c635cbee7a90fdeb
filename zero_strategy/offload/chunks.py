"""Vectors below the device's memory, in chunks; a pass reads the next ones and writes the last ones behind its work.

    bucket's owned elements   |---- chunk 0 ----|---- chunk 1 ----|-- 2 --|
    vectors of it             master 0, 1, 2;  exp_avg 0, 1, 2;  exp_avg_sq 0, 1, 2      each one record of the tier

Vectors of one bucket are cut at the same elements, so a step takes one chunk of each and needs no more memory than a
few chunks, however large a bucket or a parameter is.

    elements  |------------- head -------------|-------------- the rest --------------|
    chunks    |-- 0 --|-- 1 --|-- 2 --|-- 3 ---|-- 4 --|-- 5 --|-- 6 --|-- 7 --|- 8 --|

The head is what `offload.optimizer_ratio` leaves on the device; a chunk lies in the head or in the rest, never in both.

    read       chunk i+1, i+2 -->  [slot][slot]
    work on    chunk i             [slot]
    write      chunk i-1, i-2 <--  [slot][slot]

Memory of a pass is that of the slots, whatever the number of chunks; a chunk that is resident is worked on where it
lies. A pass that fails leaves chunks of two states, which are marked partially applied: their tier refuses them until
they are written anew.

The first chunks of a pass to come may be read before it (`read_ahead`), as many as there are slots. Whether they still
are what was read is told by the versions of their vectors.

    places of a chunk in files    present     its values
                                  held        what a save in the background reads; often the present ones
    new values                    go to the present place; where that is held, to the free one, the present one then
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, Landing, PendingIO, Tier, wait_all
from zero_strategy.runtime.observer import Observed

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


@dataclass
class Chunk:
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
    vectors: Mapping[str, OffloadedVector]
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

    chunk: Chunk
    pending: list[PendingIO]
    known: dict[str, tuple[OffloadedVector, str, int]]

    def serves(self, chunk: Chunk) -> bool:
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
        self._writes: dict[int, tuple[Chunk, list[PendingIO]]] = {}
        self._early: list[_ReadAhead] = []
        self._copied: dict[int, Landing] = {}
        self.failure: OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that have been taken."""
        return sum(memory.numel() for slot in self._slots for memory in slot.values())

    def read_ahead(self, chunks: Sequence[Chunk]) -> None:
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
                # The last pass may still write from this memory.
                self._settle_slot(slot)
                begun = _ReadAhead(chunk, [], _what_to_read(chunk))
                self._early.append(begun)
                self._read(chunk, slot, begun.pending, chunk.vectors.keys() - chunk.unchanged)
        except BaseException:
            self.forget_ahead()
            raise

    def check_ahead(self, chunks: Sequence[Chunk]) -> None:
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
        chunks: Sequence[Chunk],
        work: Callable[[Chunk, dict[str, Tensor]], object],
        *,
        wait: bool = True,
    ) -> None:
        """Works on each chunk.

        Args:
            chunks: In this order; those that were read ahead first (`check_ahead`).
            work: Takes a chunk and its part of every vector, in memory, and changes it in place. It may give the end
                of a copy out of that memory, which is waited for before something else is read into it.
            wait: Return when all is written; else `settle` does, or the next pass.

        Raises:
            OSError: If the tier fails; what `work` raises.
        """
        # Taken over: whatever happens in this pass, the next one begins without them.
        early, self._early = self._early, []
        count, reads, begun = len(self._slots), {index: each.pending for index, each in enumerate(early)}, False
        try:
            for index, chunk in enumerate(chunks):
                last = min(index + self._ahead, len(chunks) - 1)
                # The first chunk's turn fills all slots ahead, each later one the next.
                for ahead in range(index + self._ahead if index else 0, last + 1):
                    there = ahead < len(early)
                    if not there:  # else `read_ahead` has done it
                        self._settle_slot(ahead % count)
                    # Read ahead, it lacks only what a pass leaves unchanged, which could still change then.
                    keys = chunks[ahead].unchanged if there else chunks[ahead].vectors.keys()
                    self._read(chunks[ahead], ahead % count, reads.setdefault(ahead, []), keys)
                wait_all(reads.pop(index))
                begun = True  # from here on chunks may be of two states
                landing = work(chunk, self._held(chunk, index % count))
                if isinstance(landing, Landing):
                    self._copied[index % count] = landing
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
                # All of them: those that were done are of the new state, the rest of the old one.
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

    def let_copies_end(self) -> None:
        """Wait for copies out of the slots, before their memory goes."""
        for slot in list(self._copied):
            self._copied.pop(slot).on_host()

    def _settle_slot(self, slot: int) -> None:
        """Wait for what still uses a slot's memory."""
        if slot in self._copied:
            self._copied.pop(slot).on_host()
        if slot not in self._writes:
            return
        chunk, pending = self._writes.pop(slot)
        try:
            wait_all(pending)
        except BaseException as error:
            _mark_partially_applied([chunk], error)
            raise

    def _memory(self, chunk: Chunk, slot: int, key: str) -> Tensor:
        """The slot's memory for a vector's chunk, as bytes."""
        vector, known = chunk.vectors[key], self._slots[slot].get(key)
        wanted = vector.cuts.size * vector.dtype.itemsize  # of a whole chunk, so that it serves for all of this dtype
        if known is None or known.numel() < wanted:
            self._slots[slot][key] = known = vector.tier.staging(wanted)
        return known[: (chunk.stop - chunk.start) * vector.dtype.itemsize]

    def _read(self, chunk: Chunk, slot: int, pending: list[PendingIO], keys: Collection[str]) -> None:
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

    def _write(self, chunk: Chunk, slot: int) -> None:
        pending: list[PendingIO] = []
        # Noted before the first write begins: what is under way is waited for, also where the next one raises.
        self._writes[slot] = chunk, pending
        for key, vector in chunk.vectors.items():
            if key in chunk.unchanged or vector.is_resident(chunk.number):
                continue
            pending.append(vector.tier.write(vector.target(chunk.number), self._memory(chunk, slot, key)))
            vector.wrote(chunk.number)

    def _held(self, chunk: Chunk, slot: int) -> dict[str, Tensor]:
        """The chunk's part of every vector, in memory."""
        found = {}
        for key, vector in chunk.vectors.items():
            change = key not in chunk.unchanged
            resident = vector.resident(chunk.number, filled=key not in chunk.unread, change=change)
            if resident is None:
                found[key] = self._memory(chunk, slot, key).view(vector.dtype)
            else:
                found[key] = resident
        return found


def cause_of(error: BaseException) -> str:
    """An error in words, for whoever meets what it left behind before he meets the error: other ranks, a next step."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _what_to_read(chunk: Chunk) -> dict[str, tuple[OffloadedVector, str, int]]:
    """The vector, record and version that a pass would read, by key; without those that it leaves unchanged."""
    return {
        key: (vector, vector.record(chunk.number), vector.version)
        for key, vector in chunk.vectors.items()
        if key not in chunk.unchanged
    }


def _mark_partially_applied(chunks: Sequence[Chunk], cause: BaseException) -> None:
    for chunk in chunks:
        for key, vector in chunk.vectors.items():
            if key not in chunk.unchanged:
                vector.mark_partially_applied(chunk.number, f"a pass over it stopped half-way ({cause_of(cause)})")


_ONLY = "values"
_KEYS = frozenset({_ONLY})
_FIRST, _SPARE, _NONE = 0, 1, -1
"""Places of a chunk: the one that all have, and the one of `spares`."""


@dataclass(frozen=True)
class VectorSpec:
    """Description of a vector.

    Attributes:
        numel: Its elements.
        dtype: Their dtype.
        fill: What elements are that were never written.
        device: Where its head is kept; None: in the tier, as the rest.
    """

    numel: int
    dtype: torch.dtype
    fill: float = 0.0
    device: torch.device | None = None


def add_scaled(target: Tensor, values: Tensor, factor: float, *, first: bool) -> None:
    """Add `values`, which may be changed, times a factor; with `first` replace what is there. One pass where that does.

    The same bits as multiplying `values` in place, and then adding or copying them.
    """
    if first and factor != 1.0 and (values.dtype, values.device) == (target.dtype, target.device):
        torch.mul(values, factor, out=target)
        return
    if factor != 1.0:
        values.mul_(factor)
    if first:
        target.copy_(values)
    else:
        target.add_(values.to(target.device))


class VectorStore(Protocol):
    """Mover of the chunks of vectors; see `ChunkStore`."""

    tier: Tier
    memory: HostTier
    observed: Observed
    transfers: ChunkSlots
    copies: DeviceCopies

    @property
    def lock(self) -> AbstractContextManager[object]: ...

    @property
    def transferring(self) -> AbstractContextManager[object]: ...

    def cuts(self, numel: int) -> Cuts: ...

    def cached(self, vector: OffloadedVector, number: int, *, change: bool = False) -> Tensor: ...

    def drop(self, vector: OffloadedVector, number: int) -> None: ...

    def flush(self) -> None: ...

    def write_changes(self) -> None: ...

    def add_spares(self, places: Sequence[tuple[OffloadedVector, int]]) -> None: ...

    def forget(self, vector: OffloadedVector) -> None: ...


class OffloadedVector:
    """A 1-D vector in a tier.

    Attributes:
        store: Its tier, with the chunks that are in memory.
        name: Unique in its store.
        numel: Its elements.
        dtype: Their dtype.
        fill: What elements are that were never written.
        cuts: Of its chunks.
        kept: The head, where it is kept on the device.
        staying: How many of the first chunks in the tier stay in host memory instead.
        spares: Numbers of chunks that have one more place in the tier, so that what a save reads can stay.
        version: Grows with every change of its values.
    """

    def __init__(self, store: VectorStore, name: str, spec: VectorSpec) -> None:
        self.store, self.name, self.numel, self.dtype, self.fill = store, name, spec.numel, spec.dtype, spec.fill
        self.cuts = store.cuts(spec.numel)
        self.kept: Tensor | None = None
        self.version = self.staying = 0
        if spec.device is not None and self.cuts.head:
            self.kept = torch.empty(self.cuts.head, dtype=spec.dtype, device=spec.device)
        self.written = [False] * len(self.chunks)
        self.spares: set[int] = set()
        self._present = [_FIRST] * len(self.chunks)
        self._held = [_NONE] * len(self.chunks)
        self._going_up: Landing | None = None
        self._coming_down: Landing | None = None

    @property
    def tier(self) -> Tier:
        """Place of the values."""
        return self.store.tier

    def tier_of(self, number: int) -> Tier:
        """Places of the records of a chunk."""
        return self.store.memory if number < self._first + self.staying else self.store.tier

    @property
    def _first(self) -> int:
        """The first chunk that is not kept on the device."""
        return 0 if self.kept is None else self.cuts.heads

    def resident(self, number: int, *, filled: bool = True, change: bool = False) -> Tensor | None:
        """A chunk where it lies in memory (a kept head: the device's); None if it has to be read and written.

        Args:
            number: Of the chunk.
            filled: One that was never written holds what vectors are filled with; else anything.
            change: It will be written to: wait until no copy to the device reads it any more.
        """
        if self.kept is not None and number < self.cuts.heads:
            chunk = self.kept[slice(*self.chunks[number])]
        else:
            memory = self._in_host_memory(number)
            if memory is None:
                return None
            chunk = memory
            # Copies to the device only read, and so matter to whoever writes; copies from it matter to readers, too.
            if self._coming_down is not None or change or not self.written[number]:
                self.let_copies_end()
        if not self.written[number]:
            if filled:
                chunk.fill_(self.fill)
            self.written[number] = True
        return chunk

    def let_copies_end(self) -> None:
        """Wait on the host for the device's copies from and to what lies in memory."""
        copies, self._going_up, self._coming_down = (self._going_up, self._coming_down), None, None
        for landing in copies:
            if landing is not None:
                landing.on_host()
        if copies[1] is not None:
            # The host has waited for the last of them, so their memory on the device may go.
            self.store.copies.end_sums()

    def is_resident(self, number: int) -> bool:
        """True if a chunk lies in memory."""
        on_device = self.kept is not None and number < self.cuts.heads
        return on_device or self.tier_of(number).resident(self.record(number)) is not None

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of every chunk."""
        return self.cuts.chunks

    @property
    def in_tier(self) -> tuple[int, int]:
        """First and one-past-last element that is not on the device."""
        return (0 if self.kept is None else self.cuts.head), self.numel

    @property
    def staying_stop(self) -> int:
        """One past the last element that stays in host memory; the first of `in_tier` if none does."""
        return self.chunks[self._first + self.staying - 1][1] if self.staying else self.in_tier[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the tier, spare places left out."""
        return (self.numel - self.staying_stop) * self.dtype.itemsize

    def records_in(self, tier: Tier) -> dict[str, int]:
        """Needs in one tier: bytes by record."""
        spare = self.spare_records(self.spares) if tier is self.store.tier else {}
        local = (number for number in range(self._first, len(self.chunks)) if self.tier_of(number) is tier)
        return spare | {self._place(number, _FIRST): self.chunk_bytes(number) for number in local}

    def spare_records(self, numbers: Iterable[int]) -> dict[str, int]:
        """One more place for each of these chunks: bytes by record."""
        return {self._place(number, _SPARE): self.chunk_bytes(number) for number in numbers}

    @property
    def spare_bytes(self) -> tuple[int, int]:
        """Bytes that spare places ask for and take."""
        sizes = list(map(self.chunk_bytes, self.spares))
        return sum(sizes), sum(map(HostMemory.rounded, sizes))

    def chunk_bytes(self, number: int) -> int:
        """Bytes of a chunk."""
        start, stop = self.chunks[number]
        return (stop - start) * self.dtype.itemsize

    def costs(self) -> list[int]:
        """Bytes that each chunk would take in host memory, from the first on that is not on the device."""
        return [self.chunk_bytes(number) for number in range(self._first, len(self.chunks))]

    def record(self, number: int) -> str:
        """The record of a chunk."""
        return self._place(number, self._present[number])

    def target(self, number: int) -> str:
        """The record to which new values of a chunk are written: what is held stays as it is."""
        return self._place(number, self._target(number))

    def wrote(self, number: int) -> None:
        """New values of a chunk are on their way to its `target`."""
        self._present[number] = self._target(number)
        self.written[number] = True

    def hold(self, number: int) -> str | None:
        """Let a chunk's values stay where they are until it is held again, whatever is written meanwhile.

        Returns:
            Their record; None if the chunk was never written. What lies in memory cannot be held.
        """
        assert number in self.spares and not self.is_resident(number)
        self._held[number] = self._present[number] if self.written[number] else _NONE
        return self.record(number) if self.written[number] else None

    def mark_partially_applied(self, number: int, reason: str) -> None:
        """Refuse to read a chunk in the tier until it is written anew; what is held of it is as good as before."""
        if number >= self._first:
            self.tier_of(number).mark_partially_applied([self.target(number)], reason)
            # The refused place is the present one from now on; what a save holds stays in the other.
            self._present[number] = self._target(number)

    def _target(self, number: int) -> int:
        present = self._present[number]
        return self._free(number) if present == self._held[number] else present

    def _free(self, number: int) -> int:
        """The place where neither its values are nor what is held."""
        taken = (self._present[number], self._held[number])
        return next(place for place in (_FIRST, _SPARE) if place not in taken)

    def _place(self, number: int, place: int) -> str:
        return f"{self.name}/{number}" + "+" * place

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in memory of their own."""
        found = torch.empty(stop - start, dtype=self.dtype)
        for number, low, high, held in self.cuts.overlapping(start, stop):
            with self.store.lock:
                found[low - start : high - start] = self.store.cached(self, number)[low - held : high - held]
        return found

    def read_all(self, out: Tensor) -> Landing:
        """Begin to copy all of it into `out`, past the cache; the next chunk is read while one is copied.

        On a GPU `out` is filled beside what it computes, which waits for the end before `out` is let go of. The host
        waits there before it changes what has been copied from, and for files.

        Returns:
            The end of all copies, which are queued one after the other.
        """
        away, landing = [], Landing()
        with self.store.observed.span("copy", self.name, out.numel() * out.element_size()):
            for number, (begin, end) in enumerate(self.chunks):
                if (chunk := self.resident(number)) is None:
                    away.append(number)
                else:
                    # All go by one stream, so the end of the last copy is that of all.
                    self._going_up = landing = self.store.copies.up(chunk, out[begin:end], keep=False)
            return self._read_away(away, out) if away else landing

    def _read_away(self, numbers: list[int], out: Tensor) -> Landing:
        """The chunks of these numbers, which have to be read; the end of the last copy."""
        with self.store.lock:
            # Changed chunks of the cache are newer than the records, which a pass reads past it.
            self.store.flush()
        chunks = [Chunk(number, *self.chunks[number], {_ONLY: self}, unchanged=_KEYS) for number in numbers]

        landings: list[Landing] = []

        def copy(chunk: Chunk, held: dict[str, Tensor]) -> Landing:
            landings[:] = [self.store.copies.up(held[_ONLY], out[chunk.start : chunk.stop], keep=False)]
            return landings[0]

        with self.store.transferring:
            self.store.transfers.run(chunks, copy)
        return landings[0]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on."""
        flat = values.detach().reshape(-1)
        for number, low, high, held in self.cuts.overlapping(start, start + flat.numel()):
            with self.store.lock:
                chunk = self.store.cached(self, number, change=True)
                chunk[low - held : high - held] = flat[low - start : high - start]

    def add_all(
        self,
        values: Tensor,
        *,
        first: bool,
        look: Callable[[int, Tensor], object] | None = None,
        factor: float = 1.0,
    ) -> None:
        """Add to every element, or with `first` replace it; goes on writing when this returns.

        Args:
            values: (numel,), of any dtype and device; they may be changed.
            factor: What they are multiplied by first.
            look: Takes the first element's number and the sums, chunk by chunk, while they are in memory.
        """
        chunks = [
            Chunk(number, *place, {_ONLY: self}, unread=_KEYS if first else frozenset())
            for number, place in enumerate(self.chunks)
        ]

        def add(chunk: Chunk, held: dict[str, Tensor]) -> None:
            target = held[_ONLY]
            add_scaled(target, values[chunk.start : chunk.stop], factor, first=first)
            if look is not None:
                look(chunk.start, target)

        # Before anything moves: what has been read ahead of the old values serves no step any more.
        self.version += 1
        with self.store.lock:
            # The cache is written and emptied first: its chunks would be older than the sums, and written over them.
            self.store.flush()
        work: Callable[[Chunk, dict[str, Tensor]], object] = add
        with self.store.observed.span("copy", self.name, self.numel * self.dtype.itemsize):
            if not self.store.copies.at_once:
                chunks, work = self._add_from_device(chunks, self._staged(values, factor, first=first), first, look)
            with self.store.transferring:
                self.store.transfers.run(chunks, work, wait=False)

    def _staged(self, values: Tensor, factor: float, *, first: bool) -> Tensor:
        """Scaled values in memory of their own, since the caller's is used again while they are on their way down."""
        self.store.copies.begin_sums()
        scaled = values if factor == 1.0 else torch.mul(values, factor)
        return scaled.to(self.dtype if first else scaled.dtype, copy=scaled is values)

    def _add_from_device(
        self, chunks: list[Chunk], values: Tensor, first: bool, look: Callable[[int, Tensor], object] | None
    ) -> tuple[list[Chunk], Callable[[Chunk, dict[str, Tensor]], None]]:
        """Begin with the chunks that lie in host memory; the others, and what adds to those."""
        copies, earlier = self.store.copies, self._coming_down or Landing()

        def begin(chunk: Chunk, target: Tensor) -> Landing:
            seen = None if look is None else partial(look, chunk.start)
            return copies.add_down(values[chunk.start : chunk.stop], target, first=first, earlier=earlier, look=seen)

        def add(chunk: Chunk, held: dict[str, Tensor]) -> None:
            if self.kept is None or chunk.number >= self.cuts.heads:
                begin(chunk, held[_ONLY]).on_host()  # then it is written to a file
                return
            add_scaled(held[_ONLY], values[chunk.start : chunk.stop], 1.0, first=first)
            if look is not None:
                look(chunk.start, held[_ONLY])

        rest = []
        for chunk in chunks:
            memory = self._in_host_memory(chunk.number)
            if memory is None:
                rest.append(chunk)
                continue
            # The device reads what it adds to, so what was never written is filled by the host, when no copy runs.
            if not first and not self.written[chunk.number]:
                self.let_copies_end()
                memory.fill_(self.fill)
            self.written[chunk.number] = True
            self._coming_down = begin(chunk, memory)
        return rest, add

    def _in_host_memory(self, number: int) -> Tensor | None:
        """A chunk that lies there, though copies from and to it may be under way; None if it does not."""
        if self.kept is not None and number < self.cuts.heads:
            return None
        memory = self.tier_of(number).resident(self.record(number))
        return None if memory is None else memory.view(self.dtype)

    def change(self, start: int, stop: int, how: Callable[[Tensor], object]) -> None:
        """Change elements [start, stop) in place, a few at a time."""
        for number, low, high, held in self.cuts.overlapping(start, stop):
            with self.store.lock:
                how(self.store.cached(self, number, change=True)[low - held : high - held])

    def blank(self) -> None:
        """Let all elements be what they are filled with; nothing is written."""
        self.version += 1
        self.store.forget(self)
        self.written = [False] * len(self.written)

    def part(self, start: int, shape: torch.Size | tuple[int, ...]) -> OffloadedPart:
        """A range of it, as a tensor of this shape that has to be read."""
        return OffloadedPart(self, start, torch.Size(shape))


@dataclass(frozen=True)
class Powers:
    """Sum of powers of values that need not be read for it.

    Attributes:
        norm_type: p.
        total: The sum of |x| ** p in float64 (inf: the largest |x|), or its digits, see `ops.exact_sums`.
        nonfinite: How many x are not finite.
    """

    norm_type: float
    total: float | Tensor
    nonfinite: int


class OffloadedPart:
    """Stand-in for a tensor whose values are in a tier.

    Attributes:
        vector: Of which it is a part.
        start: Its first element there.
        shape: Of the tensor.
        powers: What is known of its values without reading them.
    """

    def __init__(self, vector: OffloadedVector, start: int, shape: torch.Size) -> None:
        self.vector, self.start, self.shape = vector, start, shape
        self.powers: Powers | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.vector.dtype

    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        return self.vector.read(self.start, self.start + self.numel()).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        self.vector.write(self.start, values)

    def narrow(self, start: int, stop: int) -> OffloadedPart:
        """Elements [start, stop) of it, flat."""
        return self.vector.part(self.start + start, (stop - start,))


def visit(parts: Sequence[OffloadedPart], look: Callable[[list[int], list[Tensor]], object]) -> None:
    """Look at values in order of where they lie, as few at once as a chunk has; the next chunk is read meanwhile.

    Args:
        parts: In any order.
        look: Takes positions in `parts`, and for each a flat view of some of its values, not to be written to.
    """
    by_vector: dict[int, tuple[OffloadedVector, dict[int, list[int]]]] = {}
    for position, part in enumerate(parts):
        _, places = by_vector.setdefault(id(part.vector), (part.vector, {}))
        for number, *_ in part.vector.cuts.overlapping(part.start, part.start + part.numel()):
            places.setdefault(number, []).append(position)
    for vector, places in by_vector.values():

        def show(chunk: Chunk, held: dict[str, Tensor], places: dict[int, list[int]] = places) -> None:
            found = []
            for position in places[chunk.number]:
                part = parts[position]
                low, high = max(chunk.start, part.start), min(chunk.stop, part.start + part.numel())
                found.append(held[_ONLY][low - chunk.start : high - chunk.start])
            look(places[chunk.number], found)

        with vector.store.lock:
            # Changed chunks of the cache are newer than the records, which a pass reads past it.
            vector.store.flush()
        chunks = [Chunk(number, *vector.chunks[number], {_ONLY: vector}, unchanged=_KEYS) for number in sorted(places)]
        with vector.store.transferring:
            vector.store.transfers.run(chunks, show)
