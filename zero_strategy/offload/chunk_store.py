"""The vectors of one tier, the cache of their chunks, and the host memory for resident ones.

    allowance |== parameters, unit by unit ==|== reduced gradients ==|   in this order, in whole chunks
              chunks that fit stay in memory, from the first of each vector on; the others are records of files

The engine and the plan ask in the same order, so that both know which chunks those are.

A step takes whole chunks (`memory.chunk_pass`). Everything else (loading, saving, a look at one parameter) reads and
writes ranges of vectors (`memory.vectors`) through the chunks that are cached here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zero_strategy.offload.chunk_pass import ChunkSlots, Cuts, head_numel
from zero_strategy.offload.chunks import OffloadedVector, VectorSpec
from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, Tier
from zero_strategy.runtime.observer import Observed

PAGE_BYTES = 4096
"""Chunks are accounted for in pages."""


class Allowance:
    """Bytes that are given away, first come first served.

    Args:
        nbytes: How many there are.

    Attributes:
        left: Those that nobody has.
    """

    def __init__(self, nbytes: int) -> None:
        assert nbytes >= 0
        self.left = nbytes

    def take(self, sizes: Iterable[int]) -> int:
        """Number of the first chunks of these sizes, in bytes, that stay in memory; their bytes are taken."""
        count = 0
        for size in sizes:
            pages = _whole_pages(size)
            if pages > self.left:
                break
            self.left -= pages
            count += 1
        return count

    def give_back(self, sizes: Iterable[int]) -> None:
        """Return the bytes of chunks that stayed."""
        self.left += sum(map(_whole_pages, sizes))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

TRANSFER_SLOTS = 3
"""Chunks that are in memory while a whole vector is read or added to."""


class ChunkStore:
    """The vectors in one tier, and the few of their chunks that are in memory.

    Args:
        tier: Where they live.
        chunk_numel: Elements per chunk.
        cached_chunks: How many chunks reads and writes of ranges keep in memory.
        ratio: The part of every vector that is not its head.
        allowance: Host memory for the first chunks of vectors; None: there is none.
        pinned: Page-lock that memory.
        copies: By which whole vectors go to a device; default: at once.
        observed: Who is told of copies; None: nobody.

    Attributes:
        memory: Where those chunks are.
        lock: Held while a cached chunk is used; threads of a reader write into vectors.
        passes: Memory of passes that others make, which may have something under way.
        transfers: Memory through which whole vectors pass.
        transferring: Held while they do: a gather reads in a thread of its own.
        observed: See the argument.
    """

    def __init__(
        self,
        tier: Tier,
        chunk_numel: int,
        cached_chunks: int = 4,
        ratio: float = 1.0,
        allowance: Allowance | None = None,
        pinned: bool = False,
        copies: DeviceCopies | None = None,
        observed: Observed | None = None,
    ) -> None:
        assert chunk_numel > 0 and cached_chunks > 0
        self._allowance, self.memory = allowance or Allowance(0), HostTier(pinned)
        self.tier, self.chunk_numel, self.ratio, self.lock = tier, chunk_numel, ratio, threading.RLock()
        self.copies = copies or DeviceCopies(torch.device("cpu"))
        self.vectors: dict[str, OffloadedVector] = {}
        self.passes: list[ChunkSlots] = []
        self.transfers, self.transferring = ChunkSlots(TRANSFER_SLOTS), threading.Lock()
        self.observed = observed or Observed()
        self._limit, self._numbers = cached_chunks, itertools.count()
        self._cache: OrderedDict[tuple[str, int], tuple[Tensor, list[bool]]] = OrderedDict()

    def cuts(self, numel: int) -> Cuts:
        """Cuts of vectors of this many elements."""
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

    def add_spares(self, wanted: Iterable[tuple[OffloadedVector, int]]) -> None:
        """Give chunks in files one more place, where they have none yet: by vector and number.

        Raises:
            OSError: If the tier has no room; then none has got one.
        """
        missing = [(vector, number) for vector, number in wanted if number not in vector.spares]
        sizes = {name: size for vector, number in missing for name, size in vector.spare_records([number]).items()}
        if sizes:
            self.tier.reserve(sizes)
        for vector, number in missing:
            vector.spares.add(number)

    @property
    def spare_bytes(self) -> tuple[int, int]:
        """Bytes that spare places ask for and take."""
        found = [vector.spare_bytes for vector in self.vectors.values()]
        return sum(asked for asked, _ in found), sum(taken for _, taken in found)

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
            if vector.written[number] and not (change and self.tier.is_partially_applied(vector.record(number))):
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
            self.tier.write(vector.target(number), memory).wait()
            vector.wrote(number)
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
        self._settle_transfers()

    def settle(self) -> None:
        """Wait for what passes have left under way; no pass goes on meanwhile.

        Raises:
            OSError: If something could not be written; what that was is refused from then on.
        """
        with contextlib.ExitStack() as all_of_it:
            all_of_it.callback(self._settle_transfers)
            for slots in self.passes:
                all_of_it.callback(slots.tell_failure)
                all_of_it.callback(slots.settle)
                all_of_it.callback(slots.forget_ahead)

    def _settle_transfers(self) -> None:
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
