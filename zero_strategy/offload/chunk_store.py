"""The vectors of one tier: the cache of their chunks, the memory for resident ones, and images of them at one moment.

    allowance |== parameters, unit by unit ==|== reduced gradients ==|   in this order, in whole chunks
              chunks that fit stay in memory, from the first of each vector on; the others are records of files

The engine and the plan ask in the same order, so that both know which chunks those are. A step takes whole chunks
(`ChunkSlots`). Everything else (loading, saving, a look at one parameter) reads and writes ranges of vectors through
the chunks that are cached here.

A save in the background reads images, all of one moment, while the vectors change:

    chunk in files     stays where it is; what is written to it meanwhile goes to a spare place (`chunks`)
    chunk in memory    is copied into files at that moment: there is no memory for a copy of it

So nothing waits for whoever reads, and memory is that of a few chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from zero_strategy.offload.chunks import ChunkSlots, Cuts, OffloadedVector, VectorSpec, VectorStore, head_numel
from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, PendingIO, Tier, wait_all
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
            # Not even a smaller one behind it: what stays is one range of a vector, from its first chunk in the tier
            # on.
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
        with contextlib.ExitStack() as undo:
            # Whatever fails, no vector is added, so the allowance and the room are for others again.
            undo.callback(self._leave, made.values())
            for tier in (self.tier, self.memory):
                sizes = {name: size for each in made.values() for name, size in each.records_in(tier).items()}
                if sizes:
                    tier.reserve(sizes)
                    undo.callback(tier.release, sizes)
            undo.pop_all()
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
                vector.let_copies_end()  # the memory goes
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
        if (resident := vector.resident(number, change=change)) is not None:
            return resident
        key = (vector.name, number)
        if key not in self._cache:
            with self.transferring:
                # What a pass has left being written is in its record, or known to have failed, before a range is read.
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
            # Called from the last on, and all of them, whichever raise: reads ahead are dropped, writes end, errors are
            # told.
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
            self.transfers.let_copies_end()
            for vector in self.vectors.values():
                vector.let_copies_end()  # no memory is unmapped under a copy
            self.memory.close()
            self.tier.close()  # of several stores of one tier the last finds nothing to do


PART_BYTES = 16 << 20
"""Bytes of a record; two of them are in memory while copies are made."""
_UNDER_WAY = 2


class FileCopies:
    """Tensors by name, each in records of its own. Room is kept from time to time, if the same is needed.

    Args:
        tier: Whose records they are.
        label: Begins their names, which nobody else uses in the tier.
    """

    def __init__(self, tier: Tier, label: str) -> None:
        self._tier, self._label = tier, label
        self._sizes: dict[str, int] = {}

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that are asked for and taken."""
        return sum(self._sizes.values()), sum(map(HostMemory.rounded, self._sizes.values()))

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for tensors of these bytes, and for no others; what was copied before is given up.

        Raises:
            OSError: If there is none.
        """
        # Of no bytes there is no record; `read` knows.
        wanted = {name: size for name, size in sizes.items() if size}
        if wanted == self._sizes:
            return
        self.clear()
        parts = [part for name, size in wanted.items() for part in _parts(self._at(name), size)]
        if parts:
            self._tier.reserve({record: stop - start for record, start, stop in parts})
        # Only now: had there been no room, `clear` would give back records that are not there.
        self._sizes = wanted

    def clear(self) -> None:
        """Give all room back."""
        sizes, self._sizes = self._sizes, {}
        self._tier.release([record for name in sizes for record, *_ in _parts(self._at(name), sizes[name])])

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy contiguous tensors of any device; nothing of them is needed any more when this returns.

        Raises:
            OSError: If the tier fails.
        """
        room: list[HostMemory | None] = [None] * _UNDER_WAY
        pending: list[PendingIO | None] = [None] * _UNDER_WAY
        turn = 0
        try:
            for name, tensor in tensors:
                values = tensor.detach().reshape(-1).view(torch.uint8)
                for record, start, stop in _parts(self._at(name), values.numel()):
                    slot, turn = turn % _UNDER_WAY, turn + 1
                    # Taken out first, so that the wait at the end does not raise its error once more.
                    before, pending[slot] = pending[slot], None
                    if before is not None:
                        before.wait()
                    memory = room[slot]
                    if memory is None or memory.nbytes < stop - start:
                        room[slot] = memory = HostMemory(stop - start)
                    part = memory.bytes[: stop - start]
                    part.copy_(values[start:stop])
                    pending[slot] = self._tier.write(record, part)
        finally:
            wait_all([each for each in pending if each is not None])

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy, flat, in memory of its own.

        Raises:
            OSError: If the tier fails.
        """
        nbytes = self._sizes.get(name, 0)
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        memory = HostMemory(nbytes).bytes[:nbytes]
        pending: list[PendingIO] = []
        try:
            for record, start, stop in _parts(self._at(name), nbytes):
                pending.append(self._tier.read(record, memory[start:stop]))
        finally:
            wait_all(pending)
        return memory.view(dtype)

    def _at(self, name: str) -> str:
        return f"{self._label}/{name}"


def _parts(name: str, nbytes: int) -> list[tuple[str, int, int]]:
    """Records of a tensor: name, first and one-past-last byte."""
    return [(f"{name}/{start}", start, min(start + PART_BYTES, nbytes)) for start in range(0, nbytes, PART_BYTES)]


VectorReader = Callable[[OffloadedVector, int, int], Callable[[int, int], Tensor]]
"""Takes a vector and which of its elements will be asked for; gives what reads some of them."""
_CACHED = 4


def live_values(vector: OffloadedVector, start: int, stop: int) -> Callable[[int, int], Tensor]:
    """A `VectorReader` of the values that vectors have when they are read."""
    return vector.read


class StateImages:
    """Images of vectors, all of one moment. Wanted, then reserved, then taken, then read, by one thread at a time.

    Args:
        copies: Where copies of what is in memory go.
    """

    def __init__(self, copies: FileCopies) -> None:
        self._copies = copies
        self._images: dict[int, _Image] = {}
        self._cache: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def reader(self, vector: OffloadedVector, start: int, stop: int) -> Callable[[int, int], Tensor]:
        """A `VectorReader` of the values at the moment when images are taken."""
        image = self._images.setdefault(id(vector), _Image(vector, len(self._images)))
        image.wanted.update(number for number, *_ in vector.cuts.overlapping(start, stop))
        return partial(self._read, image)

    def reserve(self, further: Mapping[str, int]) -> None:
        """Make room.

        Args:
            further: Bytes of what else is copied, by name.

        Raises:
            OSError: If there is none.
        """
        sizes, spare = dict(further), dict[VectorStore, list[tuple[OffloadedVector, int]]]()
        for image in self._images.values():
            for number in sorted(image.wanted):
                if image.vector.is_resident(number):
                    sizes[image.name(number)] = image.vector.chunk_bytes(number)
                else:
                    spare.setdefault(image.vector.store, []).append((image.vector, number))
        for store, places in spare.items():  # together, for each time is a file
            store.add_spares(places)
        self._copies.reserve(sizes)

    def take(self) -> None:
        """Now is the moment. No other images are read any more.

        Raises:
            OSError: If the tier fails.
        """
        for store in {image.vector.store for image in self._images.values()}:
            # The cache is newer than the records, which are held as they are.
            store.write_changes()
        for image in self._images.values():
            image.hold()
        # Training waits for these copies, since it changes in place what they are made of.
        self._copies.write(self._resident())

    def _resident(self) -> Iterator[tuple[str, Tensor]]:
        for image in self._images.values():
            for number in sorted(image.wanted):
                if image.vector.is_resident(number) and image.vector.written[number]:
                    chunk = image.vector.resident(number)
                    assert chunk is not None
                    image.copied.add(number)
                    yield image.name(number), chunk

    def _read(self, image: _Image, start: int, stop: int) -> Tensor:
        vector = image.vector
        found = torch.empty(stop - start, dtype=vector.dtype)
        for number, low, high, first in vector.cuts.overlapping(start, stop):
            found[low - start : high - start] = self._chunk(image, number)[low - first : high - first]
        return found

    def _chunk(self, image: _Image, number: int) -> Tensor:
        key = image.number, number
        if key not in self._cache:
            while len(self._cache) >= _CACHED:
                self._cache.popitem(last=False)
            self._cache[key] = self._values(image, number)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _values(self, image: _Image, number: int) -> Tensor:
        vector = image.vector
        if number in image.copied:
            return self._copies.read(image.name(number), vector.dtype)
        record, nbytes = image.records.get(number), vector.chunk_bytes(number)
        if record is None:
            return torch.full((nbytes // vector.dtype.itemsize,), vector.fill, dtype=vector.dtype)
        memory = HostMemory(nbytes).bytes[:nbytes]
        vector.tier.read(record, memory).wait()
        return memory.view(vector.dtype)


class _Image:
    """Image of one vector.

    Attributes:
        vector: The vector.
        number: Tells it from others of the same moment.
        wanted: Numbers of its chunks that will be read.
        copied: Those of which there is a copy.
        records: Where others are; those that were never written have none.
    """

    def __init__(self, vector: OffloadedVector, number: int) -> None:
        self.vector, self.number = vector, number
        self.wanted, self.copied = set[int](), set[int]()
        self.records: dict[int, str] = {}

    def name(self, number: int) -> str:
        """Name of the copy of a chunk."""
        return f"{self.number}:{number}"

    def hold(self) -> None:
        """Keep chunks in files as they are now."""
        for number in sorted(self.wanted & self.vector.spares):  # what lies in memory has no spare place
            record = self.vector.hold(number)
            if record is not None:
                self.records[number] = record
