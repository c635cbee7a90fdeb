"""Vectors below the device's memory, in chunks.

    bucket's owned elements   |---- chunk 0 ----|---- chunk 1 ----|-- 2 --|
    vectors of it             master 0, 1, 2;  exp_avg 0, 1, 2;  exp_avg_sq 0, 1, 2      each one record of the tier

Vectors of one bucket are cut at the same elements, so a step takes one chunk of each and needs no more memory than a
few chunks, however large a bucket or a parameter is. The head of a vector (`Cuts`) may be kept on the device.

    places of a chunk in files    present     its values
                                  held        what a save in the background reads; often the present ones
    new values                    go to the present place; where that is held, to the free one, the present one then
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.offload.chunk_pass import Chunk, ChunkSlots, Cuts
from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, Tier
from zero_strategy.runtime.observer import Observed

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

    def read_all(self, out: Tensor) -> None:
        """Copy all of it into `out`, past the cache; the next chunk is read while one is copied.

        On a GPU `out` is filled beside what it computes, and complete when this returns.
        """
        away, landings = [], []
        with self.store.observed.span("copy", self.name, out.numel() * out.element_size()):
            for number, (begin, end) in enumerate(self.chunks):
                if (chunk := self.resident(number)) is None:
                    away.append(number)
                else:
                    landings.append(self.store.copies.up(chunk, out[begin:end]))
            if away:
                self._read_away(away, out)
            for landing in landings:
                landing.on_host()

    def _read_away(self, numbers: list[int], out: Tensor) -> None:
        """The chunks of these numbers, which have to be read."""
        with self.store.lock:
            self.store.flush()
        chunks = [Chunk(number, *self.chunks[number], {_ONLY: self}, unchanged=_KEYS) for number in numbers]

        def copy(chunk: Chunk[OffloadedVector], held: dict[str, Tensor]) -> None:
            # The slot's memory is read into again at once.
            self.store.copies.up(held[_ONLY], out[chunk.start : chunk.stop]).on_host()

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

        def add(chunk: Chunk[OffloadedVector], held: dict[str, Tensor]) -> None:
            target = held[_ONLY]
            add_scaled(target, values[chunk.start : chunk.stop], factor, first=first)
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
    """Stand-in for a tensor whose values are in a tier.

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

        def show(chunk: Chunk[OffloadedVector], held: dict[str, Tensor], places: dict[int, list[int]] = places) -> None:
            found = []
            for position in places[chunk.number]:
                part = parts[position]
                low, high = max(chunk.start, part.start), min(chunk.stop, part.start + part.numel())
                found.append(held[_ONLY][low - chunk.start : high - chunk.start])
            look(places[chunk.number], found)

        with vector.store.lock:
            vector.store.flush()
        chunks = [Chunk(number, *vector.chunks[number], {_ONLY: vector}, unchanged=_KEYS) for number in sorted(places)]
        with vector.store.transferring:
            vector.store.transfers.run(chunks, show)
