"""Vectors that live below the device's memory, in chunks: what an optimizer keeps of a bucket, on NVMe.

    bucket's owned elements   |---- chunk 0 ----|---- chunk 1 ----|-- 2 --|
    vectors of it             master 0, 1, 2;  exp_avg 0, 1, 2;  exp_avg_sq 0, 1, 2      each one record of the tier

Vectors of one bucket are cut at the same elements, so a step takes one chunk of each and needs no more memory than a
few chunks, however large a bucket or a parameter is. Everything else (loading, saving, a look at one parameter) reads
and writes ranges through a few cached chunks. The head of a vector (`memory.cuts`) may be kept on the device.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.memory.cuts import Cuts, head_numel
from zero_strategy.memory.host_memory import HostMemory


class PendingIO(Protocol):
    """A read or a write under way."""

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            OSError: Naming the path, the place and the cause.
        """


class Tier(Protocol):
    """Where records are kept. Memory that is handed in is uint8, 1-D, page-aligned and of the record's size."""

    name: str

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for records of these bytes; raises OSError if there is none."""

    def resident(self, record: str) -> Tensor | None:
        """The record itself where it lies in host memory, else None."""

    def read(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to fill `memory` with a record that was written."""

    def write(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to write a record; `memory` stays as it is until it is done."""

    def staging(self, nbytes: int) -> Tensor:
        """Memory of `nbytes` bytes, at a page boundary, that reads and writes are fastest with."""

    def mark_torn(self, records: Iterable[str], reason: str) -> None:
        """Refuse to read records until they are written anew: they are of two states."""

    def is_torn(self, record: str) -> bool:
        """Whether a record is refused."""

    def release(self, records: Iterable[str]) -> None:
        """Give the room of records back."""

    def close(self) -> None:
        """Wait for what is under way and give all room back."""


@dataclass(frozen=True)
class VectorSpec:
    """What a vector is to be.

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
    """

    def __init__(self, store: ChunkStore, name: str, spec: VectorSpec) -> None:
        self.store, self.name, self.numel, self.dtype, self.fill = store, name, spec.numel, spec.dtype, spec.fill
        self.cuts = store.cuts(spec.numel)
        self.kept: Tensor | None = None
        if spec.device is not None and self.cuts.head:
            self.kept = torch.full((self.cuts.head,), spec.fill, dtype=spec.dtype, device=spec.device)
        self.written = [False] * len(self.chunks)

    @property
    def tier(self) -> Tier:
        """Where it lives."""
        return self.store.tier

    def resident(self, number: int) -> Tensor | None:
        """A chunk where it lies in memory (a kept head: the device's); None if it has to be read and written."""
        if self.kept is not None and number < self.cuts.heads:
            return self.kept[slice(*self.chunks[number])]
        memory = self.tier.resident(self.record(number))
        if memory is None:
            return None
        chunk = memory.view(self.dtype)
        if not self.written[number]:
            chunk.fill_(self.fill)
            self.written[number] = True
        return chunk

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of every chunk."""
        return self.cuts.chunks

    @property
    def in_tier(self) -> tuple[int, int]:
        """First and one-past-last element that the tier holds."""
        return (0 if self.kept is None else self.cuts.head), self.numel

    @property
    def nbytes(self) -> int:
        """Bytes of its elements in the tier."""
        start, stop = self.in_tier
        return (stop - start) * self.dtype.itemsize

    def records(self) -> dict[str, int]:
        """What it needs in the tier: bytes by record."""
        first = 0 if self.kept is None else self.cuts.heads
        return {
            self.record(number): (self.chunks[number][1] - self.chunks[number][0]) * self.dtype.itemsize
            for number in range(first, len(self.chunks))
        }

    def record(self, number: int) -> str:
        """The record of a chunk."""
        return f"{self.name}/{number}"

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
        for number, (begin, end) in enumerate(self.chunks):
            if (chunk := self.resident(number)) is None:
                away.append(number)
            else:
                out[begin:end].copy_(chunk)
        if away:
            self._read_away(away, out)

    def _read_away(self, numbers: list[int], out: Tensor) -> None:
        """The chunks of these numbers, which have to be read."""
        store = self.store
        with store.lock:
            store.flush()
        most = max(1, min(store.chunk_numel, self.numel) * self.dtype.itemsize)
        buffers = [HostMemory(most).bytes for _ in range(2)]
        pending: list[PendingIO | None] = [None, None]

        def start(turn: int) -> None:
            begin, end = self.chunks[numbers[turn]]
            if self.written[numbers[turn]]:
                memory = buffers[turn % 2][: (end - begin) * self.dtype.itemsize]
                pending[turn % 2] = store.tier.read(self.record(numbers[turn]), memory)

        try:
            start(0)
            for turn, number in enumerate(numbers):
                begin, end = self.chunks[number]
                if (reading := pending[turn % 2]) is not None:
                    pending[turn % 2] = None
                    reading.wait()
                if turn + 1 < len(numbers):
                    start(turn + 1)
                if reading is None:
                    out[begin:end].fill_(self.fill)
                else:
                    memory = buffers[turn % 2][: (end - begin) * self.dtype.itemsize]
                    out[begin:end].copy_(memory.view(self.dtype))
        finally:
            for left in pending:
                if left is not None:
                    left.wait()

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on."""
        flat = values.detach().reshape(-1)
        for number, low, high, held in self.cuts.overlapping(start, start + flat.numel()):
            with self.store.lock:
                chunk = self.store.cached(self, number, change=True)
                chunk[low - held : high - held] = flat[low - start : high - start]

    def part(self, start: int, shape: torch.Size | tuple[int, ...]) -> OffloadedPart:
        """A range of it, as a tensor of this shape that has to be read."""
        return OffloadedPart(self, start, torch.Size(shape))


class OffloadedPart:
    """What stands for a tensor whose values are in a tier.

    Attributes:
        vector: Of which it is a part.
        start: Its first element there.
        shape: Of the tensor.
    """

    def __init__(self, vector: OffloadedVector, start: int, shape: torch.Size) -> None:
        self.vector, self.start, self.shape = vector, start, shape

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


class ChunkStore:
    """The vectors in one tier, and the few of their chunks that are in memory.

    Args:
        tier: Where they live.
        chunk_numel: Elements per chunk.
        cached_chunks: How many chunks reads and writes of ranges keep in memory.
        ratio: The part of every vector that is not its head.

    Attributes:
        lock: Held while a cached chunk is used; threads of a reader write into vectors.
    """

    def __init__(self, tier: Tier, chunk_numel: int, cached_chunks: int = 4, ratio: float = 1.0) -> None:
        assert chunk_numel > 0 and cached_chunks > 0
        self.tier, self.chunk_numel, self.ratio, self.lock = tier, chunk_numel, ratio, threading.RLock()
        self.vectors: dict[str, OffloadedVector] = {}
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
        self.tier.reserve({record: size for vector in made.values() for record, size in vector.records().items()})
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
                self.tier.release(vector.records())

    def cached(self, vector: OffloadedVector, number: int, *, change: bool = False) -> Tensor:
        """A chunk in memory, read if it has to be; the caller holds the lock."""
        if (resident := vector.resident(number)) is not None:
            return resident
        key = (vector.name, number)
        if key not in self._cache:
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

    def flush(self) -> None:
        """Write what was changed, and keep no chunk in memory."""
        with self.lock:
            while self._cache:
                self._evict()

    def close(self) -> None:
        """Give up all vectors."""
        with self.lock:
            self._cache.clear()
            self.tier.close()
