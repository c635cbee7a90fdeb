"""Vectors that live below the device's memory, in chunks: what an optimizer keeps of a bucket, on NVMe.

    bucket's owned elements   |---- chunk 0 ----|---- chunk 1 ----|-- 2 --|
    vectors of it             master 0, 1, 2;  exp_avg 0, 1, 2;  exp_avg_sq 0, 1, 2      each one record of the tier

Vectors of one bucket are cut at the same elements, so a step takes one chunk of each and needs no more memory than a
few chunks, however large a bucket or a parameter is. Everything else (loading, saving, a look at one parameter) reads
and writes ranges through a few cached chunks. The head of a vector (`memory.cuts`) may be kept on the device.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy.memory.allowance import Allowance
from zero_strategy.memory.chunk_pass import Chunk, ChunkSlots
from zero_strategy.memory.cuts import Cuts, head_numel
from zero_strategy.memory.host import HostTier
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.tier import Tier
from zero_strategy.observing import Observed

TRANSFER_SLOTS = 3
"""Chunks that are in memory while a whole vector is read or added to."""
_ONLY = "values"
_KEYS = frozenset({_ONLY})


@dataclass(frozen=True)
class VectorSpec:
    """What a vector is to be.

    Attributes:
        numel: Its elements.
        dtype: Their dtype.
        fill: What elements are that were never written.
        device: Where its head is kept; None: in the tier, as the rest.
        twice: Chunks of the rest have a second place, for values to come.
        headless: It has no values for the head at all.
    """

    numel: int
    dtype: torch.dtype
    fill: float = 0.0
    device: torch.device | None = None
    twice: bool = False
    headless: bool = False


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
        twice: Chunks of the rest have a second place, for values to come.
        staying: How many of the first chunks in the tier stay in host memory instead.
        version: Grows with every change of its values.
    """

    def __init__(self, store: ChunkStore, name: str, spec: VectorSpec) -> None:
        self.store, self.name, self.numel, self.dtype, self.fill = store, name, spec.numel, spec.dtype, spec.fill
        self.cuts = store.cuts(spec.numel)
        self.kept: Tensor | None = None
        self.twice, self._headless, self.version, self.staying = spec.twice, spec.headless, 0, 0
        if spec.device is not None and self.cuts.head:
            self.kept = torch.empty(self.cuts.head, dtype=spec.dtype, device=spec.device)
        self.written = [False] * len(self.chunks)
        self._second = [False] * len(self.chunks)

    @property
    def tier(self) -> Tier:
        """Where it lives."""
        return self.store.tier

    def tier_of(self, number: int) -> Tier:
        """Where the records of a chunk are."""
        return self.store.memory if number < self._first + self.staying else self.store.tier

    @property
    def _first(self) -> int:
        """The first chunk that is not kept on the device."""
        return 0 if self.kept is None and not self._headless else self.cuts.heads

    def resident(self, number: int, *, filled: bool = True) -> Tensor | None:
        """A chunk where it lies in memory (a kept head: the device's); None if it has to be read and written.

        Without `filled`, one that was never written holds anything.
        """
        if self.kept is not None and number < self.cuts.heads:
            chunk = self.kept[slice(*self.chunks[number])]
        else:
            memory = self.tier_of(number).resident(self.record(number))
            if memory is None:
                return None
            chunk = memory.view(self.dtype)
        if not self.written[number]:
            if filled:
                chunk.fill_(self.fill)
            self.written[number] = True
        return chunk

    def is_resident(self, number: int) -> bool:
        """Whether a chunk lies in memory."""
        on_device = self.kept is not None and number < self.cuts.heads
        return on_device or self.tier_of(number).resident(self.record(number)) is not None

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of every chunk."""
        return self.cuts.chunks

    @property
    def in_tier(self) -> tuple[int, int]:
        """First and one-past-last element that is not on the device."""
        return (0 if self.kept is None and not self._headless else self.cuts.head), self.numel

    @property
    def staying_stop(self) -> int:
        """One past the last element that stays in host memory; the first of `in_tier` if none does."""
        return self.chunks[self._first + self.staying - 1][1] if self.staying else self.in_tier[0]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the tier, second places left out."""
        return (self.numel - self.staying_stop) * self.dtype.itemsize

    @property
    def nbytes_aside(self) -> int:
        """Bytes of second places in the tier."""
        return (self.numel - max(self.cuts.head, self.staying_stop)) * self.dtype.itemsize if self.twice else 0

    def records(self) -> dict[str, int]:
        """What it needs off the device: bytes by record."""
        return {record: size for found in self._records() for record, size in found.items()}

    def records_in(self, tier: Tier) -> dict[str, int]:
        """What it needs in one tier: bytes by record."""
        first = self._first
        return {
            record: size
            for number, found in enumerate(self._records(), first)
            if self.tier_of(number) is tier
            for record, size in found.items()
        }

    def costs(self) -> list[int]:
        """What each chunk would take in host memory, in bytes, from the first on that is not on the device."""
        return [sum(found.values()) for found in self._records()]

    def _records(self) -> Iterator[dict[str, int]]:
        """By chunk, from the first on that is not on the device: bytes by record."""
        for number in range(self._first, len(self.chunks)):
            start, stop = self.chunks[number]
            size = (stop - start) * self.dtype.itemsize
            yield {self.record(number): size} | ({self.aside(number): size} if number >= self.cuts.heads else {})

    def record(self, number: int) -> str:
        """The record of a chunk."""
        return self._place(number, self._second[number])

    def aside(self, number: int) -> str:
        """The record of a chunk's values to come; where there are no second places: the only one."""
        return self._place(number, self._second[number] ^ self.twice)

    def _place(self, number: int, second: bool) -> str:
        return f"{self.name}/{number}+" if second else f"{self.name}/{number}"

    def resident_aside(self, number: int, *, copied: bool) -> Tensor:
        """The memory of a resident chunk's values to come; with `copied` it begins with the present ones."""
        memory = self.tier_of(number).resident(self.aside(number))
        assert memory is not None and number >= self.cuts.heads
        values = memory.view(self.dtype)
        if copied and self.twice:
            present = self.resident(number)
            assert present is not None
            values.copy_(present)
        return values

    def adopt(self, number: int) -> None:
        """Let the values to come of a chunk be its values."""
        assert self.twice and number >= self.cuts.heads
        self.store.drop(self, number)
        self._second[number] = not self._second[number]
        self.written[number] = True
        self.version += 1

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in memory of their own."""
        found = torch.empty(stop - start, dtype=self.dtype)
        for number, low, high, held in self.cuts.overlapping(start, stop):
            with self.store.lock:
                found[low - start : high - start] = self.store.cached(self, number)[low - held : high - held]
        return found

    def read_all(self, out: Tensor) -> None:
        """Copy all of it into `out`, past the cache; the next chunk is read while one is copied."""
        away = []
        with self.store.observed.span("copy", self.name, out.numel() * out.element_size()):
            for number, (begin, end) in enumerate(self.chunks):
                if (chunk := self.resident(number)) is None:
                    away.append(number)
                else:
                    out[begin:end].copy_(chunk)
            if away:
                self._read_away(away, out)

    def _read_away(self, numbers: list[int], out: Tensor) -> None:
        """The chunks of these numbers, which have to be read."""
        with self.store.lock:
            self.store.flush()
        chunks = [Chunk(number, *self.chunks[number], {_ONLY: self}, unchanged=_KEYS) for number in numbers]

        def copy(chunk: Chunk, held: dict[str, Tensor]) -> None:
            out[chunk.start : chunk.stop].copy_(held[_ONLY])

        with self.store.transferring:
            self.store.transfers.run(chunks, copy)

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on."""
        flat = values.detach().reshape(-1)
        for number, low, high, held in self.cuts.overlapping(start, start + flat.numel()):
            with self.store.lock:
                chunk = self.store.cached(self, number, change=True)
                chunk[low - held : high - held] = flat[low - start : high - start]

    def add_all(
        self, values: Tensor, *, first: bool, look: Callable[[int, Tensor], object] | None = None
    ) -> None:
        """Add to every element, or with `first` replace it; goes on writing when this returns.

        Args:
            values: (numel,), of any dtype and device.
            look: Takes the first element's number and the sums, chunk by chunk, while they are in memory.
        """
        chunks = [
            Chunk(number, *place, {_ONLY: self}, unread=_KEYS if first else frozenset())
            for number, place in enumerate(self.chunks)
        ]

        def add(chunk: Chunk, held: dict[str, Tensor]) -> None:
            target, here = held[_ONLY], values[chunk.start : chunk.stop]
            if first:
                target.copy_(here)
            else:
                target.add_(here.to(target.device))
            if look is not None:
                look(chunk.start, target)

        self.version += 1
        with self.store.lock:
            self.store.flush()
        with self.store.transferring, self.store.observed.span("copy", self.name, self.numel * self.dtype.itemsize):
            self.store.transfers.run(chunks, add, wait=False)

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


class OffloadedPart:
    """What stands for a tensor whose values are in a tier.

    Attributes:
        vector: Of which it is a part.
        start: Its first element there.
        shape: Of the tensor.
        powers: What is known of its values without reading them: p, the sum of |x| ** p in float64 (inf: the largest
            |x|), and how many x are not finite.
    """

    def __init__(self, vector: OffloadedVector, start: int, shape: torch.Size) -> None:
        self.vector, self.start, self.shape = vector, start, shape
        self.powers: tuple[float, float, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
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
            vector.store.flush()
        chunks = [
            Chunk(number, *vector.chunks[number], {_ONLY: vector}, unchanged=_KEYS) for number in sorted(places)
        ]
        with vector.store.transferring:
            vector.store.transfers.run(chunks, show)


class ChunkStore:
    """The vectors in one tier, and the few of their chunks that are in memory.

    Args:
        tier: Where they live.
        chunk_numel: Elements per chunk.
        cached_chunks: How many chunks reads and writes of ranges keep in memory.
        ratio: The part of every vector that is not its head.
        allowance: Host memory for the first chunks of vectors; None: there is none.

    Attributes:
        memory: Where those chunks are.
        lock: Held while a cached chunk is used; threads of a reader write into vectors.
        passes: Memory of passes that others make, which may have something under way.
        transfers: Memory through which whole vectors pass.
        transferring: Held while they do: a gather reads in a thread of its own.
        observed: Who is told of copies.
    """

    def __init__(
        self,
        tier: Tier,
        chunk_numel: int,
        cached_chunks: int = 4,
        ratio: float = 1.0,
        allowance: Allowance | None = None,
        pinned: bool = False,
    ) -> None:
        assert chunk_numel > 0 and cached_chunks > 0
        self._allowance, self.memory = allowance or Allowance(0), HostTier(pinned)
        self.tier, self.chunk_numel, self.ratio, self.lock = tier, chunk_numel, ratio, threading.RLock()
        self.vectors: dict[str, OffloadedVector] = {}
        self.passes: list[ChunkSlots] = []
        self.transfers, self.transferring = ChunkSlots(TRANSFER_SLOTS), threading.Lock()
        self.observed = Observed()
        self._limit, self._numbers = cached_chunks, itertools.count()
        self._cache: OrderedDict[tuple[str, int], tuple[Tensor, list[bool]]] = OrderedDict()

    def cuts(self, numel: int) -> Cuts:
        """How vectors of this many elements are cut."""
        return Cuts(numel, self.chunk_numel, head_numel(numel, self.ratio))

    def add(self, wanted: Mapping[str, VectorSpec]) -> dict[str, OffloadedVector]:
        """Make vectors, by name.

        Raises:
            OSError: If the tier has no room for all of them.
        """
        assert not wanted.keys() & self.vectors.keys()
        made = {name: OffloadedVector(self, name, spec) for name, spec in wanted.items()}
        for vector in made.values():
            vector.staying = self._allowance.take(vector.costs())
        try:
            for tier in (self.tier, self.memory):
                sizes = {name: size for each in made.values() for name, size in each.records_in(tier).items()}
                if sizes:
                    tier.reserve(sizes)
        except BaseException:
            self._leave(made.values())
            raise
        self.vectors.update(made)
        return made

    def take(self, name: str, spec: VectorSpec) -> OffloadedVector:
        """A vector of zeros: one that `add` has made room for, or a new one."""
        known = self.vectors.get(name)
        assert known is None or (known.numel, known.dtype) == (spec.numel, spec.dtype)
        return known or self.add({name: spec})[name]

    def new_number(self) -> int:
        """Keeps the names of several owners apart."""
        return next(self._numbers)

    def remove(self, vectors: Iterable[OffloadedVector]) -> None:
        """Give up vectors."""
        with self.lock:
            for vector in vectors:
                del self.vectors[vector.name]
                for number in range(len(vector.written)):
                    self._cache.pop((vector.name, number), None)
                for tier in (self.tier, self.memory):
                    tier.release(vector.records_in(tier))
                self._leave([vector])

    def _leave(self, vectors: Iterable[OffloadedVector]) -> None:
        for vector in vectors:
            self._allowance.give_back(vector.costs()[: vector.staying])

    def cached(self, vector: OffloadedVector, number: int, *, change: bool = False) -> Tensor:
        """A chunk in memory, read if it has to be; the caller holds the lock."""
        vector.version += change
        if (resident := vector.resident(number)) is not None:
            return resident
        key = (vector.name, number)
        if key not in self._cache:
            with self.transferring:
                self.transfers.settle()
            while len(self._cache) >= self._limit:
                self._evict()
            start, stop = vector.chunks[number]
            nbytes = (stop - start) * vector.dtype.itemsize
            memory = HostMemory(nbytes).bytes[:nbytes]
            chunk = memory.view(vector.dtype)
            # What is written to a chunk that is of two states is a checkpoint, which writes all of it.
            if vector.written[number] and not (change and self.tier.is_torn(vector.record(number))):
                self.tier.read(vector.record(number), memory).wait()
            else:
                chunk.fill_(vector.fill)
            self._cache[key] = (memory, [False])
        self._cache.move_to_end(key)
        memory, changed = self._cache[key]
        changed[0] = changed[0] or change
        return memory.view(vector.dtype)

    def _evict(self) -> None:
        (name, number), (memory, changed) = next(iter(self._cache.items()))
        if changed[0]:
            vector = self.vectors[name]
            self.tier.write(vector.record(number), memory).wait()
            vector.written[number] = True
        del self._cache[name, number]

    def write_changes(self) -> None:
        """Write what was changed in the cache."""
        with self.lock:
            while self._cache:
                self._evict()

    def drop(self, vector: OffloadedVector, number: int) -> None:
        """Keep a chunk no longer in memory; it has not been changed there."""
        with self.lock:
            self._cache.pop((vector.name, number), None)

    def flush(self) -> None:
        """Write what was changed, and keep no chunk in memory."""
        self.write_changes()
        with self.transferring:
            self.transfers.settle()

    def settle(self) -> None:
        """Wait for what passes have left under way; no pass goes on meanwhile.

        Raises:
            OSError: If something could not be written; what that was is refused from then on.
        """
        for slots in self.passes:
            slots.forget_ahead()
            slots.settle()
        with self.transferring:
            self.transfers.settle()

    def forget(self, vector: OffloadedVector) -> None:
        """Keep no chunk of a vector in memory, and do not write it."""
        with self.transferring, contextlib.suppress(OSError):  # what could not be written is not wanted
            self.transfers.settle()
        with self.lock:
            for number in range(len(vector.written)):
                self._cache.pop((vector.name, number), None)

    def close(self) -> None:
        """Give up all vectors."""
        with self.lock:
            self._cache.clear()
            self.memory.close()
            self.tier.close()  # of several stores of one tier the last finds nothing to do
