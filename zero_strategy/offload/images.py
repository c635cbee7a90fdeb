"""Images of vectors at one moment, read while the vectors change.

what a save in the background writes.

    chunk in files     stays where it is; what is written to it meanwhile goes to a spare place (`memory.vectors`)
    chunk in memory    is copied into files at that moment: there is no memory for a copy of it

So nothing waits for whoever reads, and memory is that of a few chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from zero_strategy.offload.chunks import OffloadedVector, VectorStore
from zero_strategy.offload.tier import HostMemory, PendingIO, Tier, wait_all

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
        wanted = {name: size for name, size in sizes.items() if size}
        if wanted == self._sizes:
            return
        self.clear()
        parts = [part for name, size in wanted.items() for part in _parts(self._at(name), size)]
        if parts:
            self._tier.reserve({record: stop - start for record, start, stop in parts})
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
            store.write_changes()
        for image in self._images.values():
            image.hold()
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
    """Of one vector.

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
        """Of the copy of a chunk."""
        return f"{self.number}:{number}"

    def hold(self) -> None:
        """Keep chunks in files as they are now."""
        for number in sorted(self.wanted & self.vector.spares):
            record = self.vector.hold(number)
            if record is not None:
                self.records[number] = record
