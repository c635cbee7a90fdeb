"""The storage of one rank's part of a bucket: in memory, or in a tier below it.

A bucket holds one `ShardStorage` each for its slice, its master weights and its reduced gradients, and reads and writes
ranges of them without asking where they are. `OffloadedVector` moves what is in a tier; this is what buckets see of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from zero_strategy.fsdp.layout import PieceCuts
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector, VectorSpec, add_scaled

Powers = tuple[float, float, int]
"""What is known of values without reading them, see `OffloadedPart.powers`."""


class ShardStorage(ABC):
    """Values of one rank, flat. An object stands for one place: who moves values (`moved`) has another object.

    Args:
        numel: Elements.
        dtype: Of them.
        tensor: What they lie in, where that is memory.
        vector: What they lie in, where that is a tier.

    Attributes:
        numel, dtype, tensor, vector: As above.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, tensor: Tensor | None = None, vector: OffloadedVector | None = None
    ) -> None:
        self.numel, self.dtype, self.tensor, self.vector = numel, dtype, tensor, vector

    @property
    def nbytes(self) -> int:
        """Bytes of the values, wherever they are."""
        return self.numel * self.dtype.itemsize

    @property
    def values(self) -> Tensor:
        """All values, where they lie in memory: for who works on tensors alone and knows that there is one."""
        assert self.tensor is not None, "in a tier: read, write"
        return self.tensor

    def held(self) -> Iterator[Tensor]:
        """The memory that the values take, if any."""
        if self.tensor is not None:
            yield self.tensor

    def offloaded(self) -> Iterator[OffloadedVector]:
        """The vector that the values are in, if any."""
        if self.vector is not None:
            yield self.vector

    @property
    @abstractmethod
    def chunks(self) -> list[tuple[int, int]]:
        """First and one-past-last element of the ranges that are worked on at once."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop): a view, or a copy where they are in a tier."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Replace elements from `start` on."""

    @abstractmethod
    def bring_into(self, out: Tensor) -> Callable[[], None] | None:
        """Copy all values into `out`: at once, or by what this returns."""

    @abstractmethod
    def change(self, start: int, stop: int, how: Callable[[Tensor], object]) -> None:
        """Change elements [start, stop) in place; `how` takes a few at a time."""

    @abstractmethod
    def add_all(
        self,
        values: Tensor,
        *,
        first: bool,
        factor: float = 1.0,
        look: Callable[[int, Tensor], object] | None = None,
    ) -> None:
        """Add to every element, or with `first` replace it; see `OffloadedVector.add_all`."""

    @abstractmethod
    def zero(self) -> None:
        """Let all values be zeros."""

    @abstractmethod
    def invalidate_unsharded(self, *, keep: bool) -> ShardStorage | None:
        """Take note that the values are of no use any more, nor their memory, unless that is to be kept.

        Returns:
            What is left of the place; None: nothing.
        """

    @abstractmethod
    def split(self, cuts: PieceCuts, powers: Callable[[int], Powers | None]) -> Mapping[int, Tensor | OffloadedPart]:
        """All pieces by parameter index: views, or what stands for them.

        Args:
            cuts: Of the pieces, see `layout.cuts`.
            powers: What is known of a piece, by index of a parameter.
        """

    @abstractmethod
    def moved(self, move: Callable[[Tensor], Tensor]) -> ShardStorage:
        """The values' place once memory lies where `move` puts it."""


class InMemory(ShardStorage):
    """Values in one flat tensor, which may be a part of another."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel(), tensor.dtype, tensor=tensor)
        self._tensor = tensor

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """One."""
        return [(0, self.numel)]

    def read(self, start: int, stop: int) -> Tensor:
        """A view of elements [start, stop)."""
        return self._tensor[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replace elements from `start` on."""
        self._tensor[start : start + values.numel()].copy_(values.reshape(-1))

    def bring_into(self, out: Tensor) -> None:
        """Copy all values into `out`."""
        out.copy_(self._tensor)

    def change(self, start: int, stop: int, how: Callable[[Tensor], object]) -> None:
        """Change elements [start, stop) in place, all at once."""
        how(self._tensor[start:stop])

    def add_all(
        self,
        values: Tensor,
        *,
        first: bool,
        factor: float = 1.0,
        look: Callable[[int, Tensor], object] | None = None,
    ) -> None:
        """Add to every element, or with `first` replace it, in one pass."""
        add_scaled(self._tensor, values, factor, first=first)
        if look is not None:
            look(0, self._tensor)

    def zero(self) -> None:
        """Write zeros."""
        self._tensor.zero_()

    def invalidate_unsharded(self, *, keep: bool) -> InMemory | None:
        """Keep the memory with whatever is in it, or nothing."""
        return self if keep else None

    def split(self, cuts: PieceCuts, powers: Callable[[int], Powers | None]) -> Mapping[int, Tensor | OffloadedPart]:
        """Views of all pieces, in one call of torch."""
        return split_pieces(self._tensor, cuts)

    def moved(self, move: Callable[[Tensor], Tensor]) -> InMemory:
        """The same values, where `move` puts them."""
        return InMemory(move(self._tensor))


class InTier(ShardStorage):
    """Values in a vector of a store."""

    def __init__(self, vector: OffloadedVector) -> None:
        super().__init__(vector.numel, vector.dtype, vector=vector)
        self._vector = vector

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Those of the vector."""
        return self._vector.chunks

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of elements [start, stop), in the host's memory."""
        return self._vector.read(start, stop)

    def write(self, start: int, values: Tensor) -> None:
        """Replace elements from `start` on."""
        self._vector.write(start, values)

    def bring_into(self, out: Tensor) -> Callable[[], None]:
        """A function that reads all values into `out`, in whatever thread it is called."""
        return partial(self._vector.read_all, out)

    def change(self, start: int, stop: int, how: Callable[[Tensor], object]) -> None:
        """Change elements [start, stop) in place, chunk by chunk."""
        self._vector.change(start, stop, how)

    def add_all(
        self,
        values: Tensor,
        *,
        first: bool,
        factor: float = 1.0,
        look: Callable[[int, Tensor], object] | None = None,
    ) -> None:
        """Add to every element, or with `first` replace it; goes on writing when this returns."""
        self._vector.add_all(values, first=first, look=look, factor=factor)

    def zero(self) -> None:
        """Take all chunks for unwritten; nothing is written."""
        self._vector.blank()

    def invalidate_unsharded(self, *, keep: bool) -> InTier:
        """Forget the values; the room stays."""
        self._vector.blank()
        return self

    def split(self, cuts: PieceCuts, powers: Callable[[int], Powers | None]) -> Mapping[int, Tensor | OffloadedPart]:
        """A stand-in of each piece, with what is known of it."""
        sizes, places = cuts
        starts = list(accumulate(sizes, initial=0))
        found: dict[int, Tensor | OffloadedPart] = {}
        for index, place in places:
            part = self._vector.part(starts[place], (sizes[place],))
            part.powers = powers(index)
            found[index] = part
        return found

    def moved(self, move: Callable[[Tensor], Tensor]) -> InTier:
        """The tier: a vector is in it for the whole run."""
        return self


@dataclass(frozen=True)
class StorageSite:
    """The place of a storage to be made: memory, or a name in a store.

    Attributes:
        store: The tier's; None: memory.
        name: Of the vector.
    """

    store: ChunkStore | None
    name: str

    @property
    def in_memory(self) -> bool:
        """True if values take one tensor, which others may read and fill directly."""
        return self.store is None

    def reserved(self) -> ShardStorage | None:
        """The storage for which room was made beforehand, if any."""
        vector = None if self.store is None else self.store.vectors.get(self.name)
        return None if vector is None else InTier(vector)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device, head: torch.device | None) -> ShardStorage:
        """A storage of zeros on `device`, or in the tier; a vector's head, if it has one, is on the device `head`."""
        if self.store is None:
            return InMemory(torch.zeros(numel, dtype=dtype, device=device))
        return InTier(self.store.take(self.name, VectorSpec(numel, dtype, device=head)))

    def unset(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        """The same with whatever is in memory, for who writes all of it; its head is on the device."""
        if self.store is None:
            return InMemory(torch.empty(numel, dtype=dtype, device=device))
        return self.zeros(numel, dtype, device, device)

    def copy_of(self, values: Tensor, dtype: torch.dtype, head: torch.device | None) -> ShardStorage:
        """A storage of its own with these values, in another dtype; where that is memory, on their device."""
        if self.store is None:
            return InMemory(values.to(dtype, copy=True))
        made = self.zeros(values.numel(), dtype, values.device, head)
        for start, stop in made.chunks:
            made.write(start, values[start:stop])
        return made


def split_pieces(owned: Tensor, cuts: PieceCuts) -> dict[int, Tensor]:
    """Views of all pieces in a flat tensor of owned elements, by parameter index, in one call of torch."""
    sizes, places = cuts
    parts = owned.split_with_sizes(sizes)
    return {index: parts[place] for index, place in places}
