"""The storage of one rank's shard of a bucket, in memory or a tier below it, and states moved to the host for a while.

A bucket holds one `ShardStorage` each for its slice, its master weights and its reduced gradients, and reads and writes
ranges of them without asking where they are. `OffloadedVector` moves what is in a tier; this is what buckets see of it.

`MovedStates` carries out `engine.offload_states()` and `reload_states()`.

Between training and generation a device has better uses for memory than what only the next step needs. Whole storages
are copied, padding included, and everything that was a view of one becomes the same view of its copy: parameters,
gradients and the optimizer's state stay the same objects and can be read where they are. What computes with them on the
device is refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.fsdp.layout import PieceCuts
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector, Powers, VectorSpec, add_scaled
from zero_strategy.offload.tier import HostMemory, Landing


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
    def bring_into(self, out: Tensor) -> Callable[[], Landing | None] | None:
        """Copy all values into `out`: at once, or by what this returns, which gives the end of the copy."""

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
        """Take note that the values are of no use any more.

        Args:
            keep: Memory stays for new values; else it is freed where it is this object's own.

        Returns:
            The storage that is left; None: none.
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
        self._split: tuple[PieceCuts, dict[int, Tensor]] | None = None

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
        """Views of all pieces, in one call of torch; kept, since a step asks several times."""
        if self._split is None or self._split[0] is not cuts:
            self._split = cuts, split_pieces(self._tensor, cuts)
        return self._split[1]

    def moved(self, move: Callable[[Tensor], Tensor]) -> InMemory:
        """A storage of these values where `move` puts them."""
        return InMemory(move(self._tensor))


class InTier(ShardStorage):
    """Values in a vector of a store."""

    def __init__(self, vector: OffloadedVector) -> None:
        super().__init__(vector.numel, vector.dtype, vector=vector)
        self._vector = vector

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The vector's chunks."""
        return self._vector.chunks

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of elements [start, stop), in the host's memory."""
        return self._vector.read(start, stop)

    def write(self, start: int, values: Tensor) -> None:
        """Replace elements from `start` on."""
        self._vector.write(start, values)

    def bring_into(self, out: Tensor) -> Callable[[], Landing]:
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
        """A storage with whatever is in memory, for who writes all of it; its head is on the device."""
        if self.store is None:
            return InMemory(torch.empty(numel, dtype=dtype, device=device))
        return self.zeros(numel, dtype, device, device)

    def release(self, made: ShardStorage) -> None:
        """Give up a storage that was made here; its values are lost."""
        if self.store is not None and made.vector is not None:
            self.store.remove([made.vector])

    def copy_of(self, values: Tensor, dtype: torch.dtype, head: torch.device | None) -> ShardStorage:
        """A storage of its own with these values, in another dtype; where that is memory, on their device."""
        if self.store is None:
            # Also where the dtype is the same: `values` may be a part of the bucket's buffer.
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


OPTIMIZER, MASTERS, PARAMETERS = "optim_states", "hp_params", "lp_params"
GRADIENTS = ("lp_grads", "contiguous_grad_buffer")
KINDS = (OPTIMIZER, MASTERS, PARAMETERS, *GRADIENTS)
"""What can be moved, under DeepSpeed's names: optimizer state, fp32 master weights, parameters, reduced gradients, and
buffers of those that are not reduced. Masters are the parameters themselves where these are fp32."""
IN_BACKWARD = (PARAMETERS, *GRADIENTS)
"""What a backward needs on the device."""

_ALIGNMENT = 64  # a multiple of every element's size
Move = Callable[[Tensor], Tensor]
"""Gives a tensor as it lies elsewhere, or itself if it stays."""


class Movable(Protocol):
    """Object that holds states; see `ShardedModel`."""

    device: torch.device

    def come_to_rest(self, *, parameters: bool) -> None: ...

    def relocate(self, kinds: Collection[str], move: Move) -> None: ...

    def in_tiers(self) -> dict[str, str]: ...


class MovedStates:
    """States of a model that are on the host, and the way there and back.

    Args:
        model: Whose states.

    Attributes:
        kinds: What is on the host.
    """

    def __init__(self, model: Movable) -> None:
        self._model = model
        self.kinds: frozenset[str] = frozenset()
        self._memory: list[HostMemory] = []
        self._copies: dict[int, Tensor] = {}  # bytes on the host, by their address

    def check(self, call: str, kinds: Iterable[str] = KINDS) -> None:
        """Raise if one of these kinds is on the host.

        Args:
            call: What needs them, for the message.
            kinds: Those that it needs.

        Raises:
            RuntimeError: Then; names them and the way back.
        """
        if self.kinds and (away := [kind for kind in KINDS if kind in self.kinds and kind in kinds]):
            raise RuntimeError(
                f"{call} needs states that are on the host since offload_states(): {', '.join(away)}. Call "
                "reload_states() first"
            )

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is on the host because it was moved there."""
        return bool(self._copies) and tensor.untyped_storage().data_ptr() in self._copies

    def offload(self, include: Iterable[str] | None = None, *, pin_memory: bool = True) -> None:
        """Move states to the host; those that are there stay. On this rank alone: nothing is sent.

        Args:
            include: Of `KINDS`; None: all.
            pin_memory: Page-lock the memory there, which makes both ways faster; of use with a GPU only.

        Raises:
            MemoryError, OSError: If the host has no memory for them; nothing has changed.
            RuntimeError: In a forward, a backward or a step, or if one of these was left with an exception.
            TypeError, ValueError: If `include` is no list of such names, or the config has put a kind into a tier.
        """
        kinds = self._chosen(include)
        # Before anything is copied: it refuses in the middle of a step, and lets go of what need not be moved.
        self._model.come_to_rest(parameters=PARAMETERS in kinds)
        # Tensors made in inference mode could not be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            found = self._storages(kinds, lambda tensor: tensor.device == self._model.device)
            starts, end = [], 0
            for storage in found.values():
                starts.append(end)
                end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            if found:
                # All at once, so that nothing has moved if the host has no room.
                memory = HostMemory(end, pinned=pin_memory and self._model.device.type == "cuda")
                # By way of numpy each copy gets a storage of its own, by whose address it is known.
                whole = memory.bytes.numpy()
                copies = {
                    place: torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=storage.nbytes())
                    for start, (place, storage) in zip(starts, found.items(), strict=True)
                }
                self._put(kinds, found, copies)
                self._memory.append(memory)
                self._copies.update({copy.data_ptr(): copy for copy in copies.values()})
        self.kinds |= kinds
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # others on this device shall have it

    def reload(self) -> None:
        """Move all states back that `offload` has moved. On this rank alone.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for them; nothing has changed.
        """
        with torch.inference_mode(False), torch.no_grad():
            found = self._storages(self.kinds, self.holds)
            device = self._model.device
            # Made in full before anything moves, so that a device without room leaves all on the host.
            self._put(
                self.kinds,
                found,
                {
                    place: torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                    for place, storage in found.items()
                },
            )
        self.kinds = frozenset()
        self._copies.clear()
        self._memory.clear()  # no state lies in it any more

    def _chosen(self, include: Iterable[str] | None) -> frozenset[str]:
        # It would be taken letter by letter.
        if isinstance(include, str):
            raise TypeError(f"include takes a list of kinds of state, such as [{str(include)!r}], or None for all")
        # DeepSpeed's names are members of an enum.
        asked = KINDS if include is None else [getattr(kind, "value", kind) for kind in include]
        for kind in asked:
            if kind not in KINDS:
                raise ValueError(f"offload_states() knows no state {kind!r}; accepted: {', '.join(KINDS)}")
        in_tiers = {kind: setting for kind, setting in self._model.in_tiers().items() if kind in asked}
        if in_tiers:
            raise ValueError(
                f"offload_states() cannot move {', '.join(in_tiers)}: by {', '.join(dict.fromkeys(in_tiers.values()))} "
                "they are off the device for the whole run. Leave them out of include, or the setting out of the config"
            )
        return frozenset(asked) - self.kinds

    def _storages(self, kinds: frozenset[str], wanted: Callable[[Tensor], bool]) -> dict[int, torch.UntypedStorage]:
        """The memory of these kinds, by its address; empty tensors have none."""
        found: dict[int, torch.UntypedStorage] = {}

        def look(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() and wanted(tensor):
                found.setdefault(storage.data_ptr(), storage)
            return tensor

        self._model.relocate(kinds, look)
        return found

    def _put(
        self, kinds: frozenset[str], found: Mapping[int, torch.UntypedStorage], copies: Mapping[int, Tensor]
    ) -> None:
        """Copy the bytes, then let all views be views of the copies."""
        # All bytes first: where a copy fails, every view is still one of the original.
        for place, storage in found.items():
            copies[place].copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

        def move(tensor: Tensor) -> Tensor:
            copy = copies.get(tensor.untyped_storage().data_ptr())
            if copy is None:
                return tensor
            moved = torch.empty(0, dtype=tensor.dtype, device=copy.device)
            place = copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            return moved.set_(*place)

        self._model.relocate(kinds, move)
