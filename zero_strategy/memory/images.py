"""The values of vectors at one moment, read while the vectors change: what a save in the background writes.

    chunk in files     stays where it is; what is written to it meanwhile goes to a spare place (`memory.vectors`)
    chunk in memory    is copied into files at that moment: there is no memory for a copy of it

So nothing waits for whoever reads, and memory is that of a few chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from zero_strategy.memory.file_copies import FileCopies
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.vectors import OffloadedVector, VectorStore

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
