"""Inputs that checkpoints keep for their recomputation: partitioned, contiguous or on the host.

    forward:   record = kept.keep(leaves)     this rank's part of each input, copied into one record
    backward:  record.fetch(number)           the whole input: from the host, and from the other ranks

A record lives as long as the graph that needs it; then its memory is free for another one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_strategy.activation.settings import CheckpointSettings
from zero_strategy.comm.collectives import Communicator
from zero_strategy.offload.tier import HeldCopy, HeldForCopies, HostMemory, Streams, streams_of
from zero_strategy.runtime.compute_device import beside_captures


class KeptMemory(Protocol):
    """Lends bytes to records."""

    def take(self, nbytes: int, device: torch.device, layout: str) -> Tensor:
        """Bytes for a record: uint8, 1-D.

        Args:
            nbytes: Positive.
            device: Where the inputs are.
            layout: What the record is made of.
        """
        ...

    def free(self, memory: Tensor) -> None:
        """Nobody needs these bytes any more, but for copies that are under way."""
        ...

    def close(self) -> None:
        """No record is to come; the memory of those that are there goes with them."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are kept from record to record."""
        ...


class DeviceMemory:
    """Each record is a tensor on its device, made and freed by torch's allocator."""

    reserved_bytes = 0

    def take(self, nbytes: int, device: torch.device, layout: str) -> Tensor:
        """A new tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def free(self, memory: Tensor) -> None:
        """Nothing: the tensor goes with its record."""

    def close(self) -> None:
        """Keep nothing: there is no memory but the records'."""


class LeavingMemory:
    """Memory of the host that nobody needs any more, until copies from and to it are over: it is not unmapped earlier.

    The host does not wait for them; it looks when there is something to give up, or a record to keep.

    Args:
        streams: Gives the streams that copy now.
    """

    def __init__(self, streams: Callable[[], Iterable[Any]]) -> None:
        self._streams = streams
        self._waiting: list[tuple[HostMemory, list[Any]]] = []

    def give_up(self, memory: HostMemory) -> None:
        """Let it go when all that is queued now is over."""
        self._waiting.append((memory, [stream.record_event() for stream in self._streams()]))
        self.look()

    def look(self) -> None:
        """Let go of what no copy uses any more."""
        if self._waiting:
            with beside_captures():  # to ask an event would break a CUDA graph that is captured just now
                self._waiting = [one for one in self._waiting if not all(event.query() for event in one[1])]


class HostArena:
    """Each record is host memory of its size in whole pages, page-locked for copies from a GPU, used again afterwards.

    Locking pages takes longer than filling them, so what a step needed stays for the next one. Where records change
    their size from step to step, one that is large enough serves, and what is too small goes: there are never more of
    them than were needed at one time.

    Args:
        leaving: Where memory goes that is given up.
    """

    def __init__(self, leaving: LeavingMemory) -> None:
        self._locks, self._closed = True, False
        self._leaving = leaving
        self._free: dict[bool, list[HostMemory]] = {False: [], True: []}
        self._lent: dict[int, tuple[bool, HostMemory]] = {}

    def take(self, nbytes: int, device: torch.device, layout: str) -> Tensor:
        """Memory of an earlier record, or new memory."""
        pinned = device.type == "cuda" and self._locks
        free = self._free[pinned]
        fitting = [memory for memory in free if memory.nbytes >= nbytes]
        if fitting:
            memory = min(fitting, key=_size)
            free.remove(memory)
        else:
            if free:
                too_small = max(free, key=_size)
                free.remove(too_small)
                self._leaving.give_up(too_small)
            memory = _host(nbytes, pinned)
            self._locks &= memory.pinned or not pinned  # where it failed the next ones need not try
        # By the address, which is what the slice that comes back still tells.
        self._lent[memory.bytes.data_ptr()] = pinned, memory
        return memory.bytes[:nbytes]

    def free(self, memory: Tensor) -> None:
        """Keep it for a later record."""
        pinned, whole = self._lent.pop(memory.data_ptr())
        if self._closed:
            self._leaving.give_up(whole)
        else:
            self._free[pinned].append(whole)

    def close(self) -> None:
        """Give up what waits for a record, and what is lent as it comes back."""
        self._closed = True
        for free in self._free.values():
            while free:
                self._leaving.give_up(free.pop())

    @property
    def reserved_bytes(self) -> int:
        """Lent or waiting."""
        waiting = sum(memory.nbytes for free in self._free.values() for memory in free)
        return waiting + sum(memory.nbytes for _, memory in self._lent.values())


class ContiguousMemory:
    """One buffer of a fixed number of records of one layout, made at the first of them.

    Args:
        number: Of records.
        on_host: In host memory.
        leaving: Where memory of the host goes that is given up.
    """

    def __init__(self, number: int, on_host: bool, leaving: LeavingMemory) -> None:
        self._number, self._on_host, self._leaving = number, on_host, leaving
        self._closed = False
        self._buffer: Tensor | None = None
        self._host: HostMemory | None = None
        self._layout: str | None = None
        self._free: list[int] = []
        self._slot_bytes = 0

    def take(self, nbytes: int, device: torch.device, layout: str) -> Tensor:
        """The next free part of the buffer.

        Raises:
            ValueError: If there is none, or the record's layout is not that of the others.
        """
        # No graph has a record, so a model with other inputs may begin.
        if self._buffer is None or (layout != self._layout and len(self._free) == self._number):
            self._make(nbytes, device, layout)
        if layout != self._layout:
            raise ValueError(
                "contiguous_checkpointing keeps inputs of one kind in its buffer, and a checkpoint came with "
                f"{layout} after {self._layout}; give all checkpointed layers inputs of the same shapes and dtypes, or "
                "turn contiguous_checkpointing (contiguous_memory_optimization) off"
            )
        if not self._free:
            raise ValueError(
                f"contiguous_checkpointing holds the inputs of num_checkpoints = {self._number} layers, and one more "
                "came; accepted: as many as there are checkpointed layers in a forward (number_checkpoints in the "
                "JSON). Evaluate under torch.no_grad(), or call reset() between forwards that no backward follows"
            )
        assert self._buffer is not None
        start = self._free.pop() * self._slot_bytes
        return self._buffer[start : start + nbytes]

    def free(self, memory: Tensor) -> None:
        """Make room for another record."""
        assert self._buffer is not None
        self._free.append((memory.data_ptr() - self._buffer.data_ptr()) // self._slot_bytes)
        if self._closed:
            self._give_up()

    def close(self) -> None:
        """Give the buffer up, if no record is in it; else when the last one goes."""
        self._closed = True
        self._give_up()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._buffer is None else self._number * self._slot_bytes

    def _give_up(self) -> None:
        """Let go of memory of the host that has no record."""
        if self._host is not None and len(self._free) == self._number:
            self._leaving.give_up(self._host)
            self._host = self._buffer = None

    def _make(self, nbytes: int, device: torch.device, layout: str) -> None:
        total = self._number * nbytes
        self._give_up()
        if self._on_host:
            self._host = _host(total, device.type == "cuda")
            self._buffer = self._host.bytes[:total]
        else:
            self._buffer = torch.empty(total, dtype=torch.uint8, device=device)
        self._layout, self._slot_bytes = layout, nbytes
        self._free = list(reversed(range(self._number)))


def _size(memory: HostMemory) -> int:
    return memory.nbytes


def _host(nbytes: int, pinned: bool) -> HostMemory:
    memory = HostMemory(nbytes, pinned=pinned)
    if pinned and not memory.pinned:
        warnings.warn(
            f"checkpoint_in_cpu keeps inputs in pageable memory, to which copies are slower: {memory.reason} (see "
            "`ulimit -l`)",
            stacklevel=2,
        )
    return memory


_ALIGNMENT = 64
"""Bytes; that of torch's allocator, since kernels of the CPU may give other bits for memory that lies otherwise."""


@dataclass(frozen=True)
class _Piece:
    """One input in a record."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    """Of the rank's part."""
    start: int
    """Bytes in the record."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


_LEAVING = 2
"""Records whose inputs are on the device in a forward: the present one's, and those of the one before it."""


class _Copies:
    """The stream that copies to the host and back, and the device's memory that it uses.

    The computing stream has taken that memory, and waits for the copies before the last reference goes.
    """

    def __init__(self, streams: Streams) -> None:
        # One stream for both ways keeps copies to and from memory in order when it is lent again.
        self.streams, self.stream = streams, streams.new()
        self.leaving, self.returning = HeldForCopies(streams), HeldForCopies(streams)

    def begin(self) -> AbstractContextManager[Any]:
        """Inside, work is queued after what is computed now; its memory may have been something else's before."""
        self.stream.wait_stream(self.streams.current())
        return self.streams.within(self.stream)


class KeptInputs:
    """Keeps inputs, in parts, in one buffer, on the host.

    Args:
        settings: The options.
        communicator: Of the model-parallel group: its ranks call a function with the same inputs, in the same order.

    Attributes:
        prefetches: Records that were fetched from the host ahead of their use.
    """

    def __init__(self, settings: CheckpointSettings, communicator: Communicator) -> None:
        self._settings, self._communicator = settings, communicator
        copies: dict[torch.device, _Copies | None] = {}
        self._copies = copies
        self._leaving = LeavingMemory(lambda: [one.stream for one in copies.values() if one is not None])
        self._memory = self._new_memory()
        self._records: weakref.WeakSet[KeptRecord] = weakref.WeakSet()
        self._last: weakref.ref[KeptRecord] | None = None
        self.prefetches = 0

    def _new_memory(self) -> KeptMemory:
        if self._settings.contiguous_checkpointing:
            assert self._settings.num_checkpoints is not None  # the settings have checked it
            return ContiguousMemory(self._settings.num_checkpoints, self._settings.checkpoint_in_cpu, self._leaving)
        return HostArena(self._leaving) if self._settings.checkpoint_in_cpu else DeviceMemory()

    @property
    def parts(self) -> int:
        """Ranks that an input is divided among."""
        return self._communicator.size if self._settings.partition_activations else 1

    @property
    def part(self) -> int:
        """Part that this rank keeps."""
        return self._communicator.rank if self._settings.partition_activations else 0

    @property
    def on_host(self) -> bool:
        """True if records are in host memory."""
        return self._settings.checkpoint_in_cpu

    @property
    def kept_bytes(self) -> int:
        """Bytes of the records that some graph still needs."""
        return sum(record.nbytes for record in self._records)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that outlasts records: the contiguous buffer, the host's arena."""
        return self._memory.reserved_bytes

    def reset(self) -> None:
        """Let go of all memory. What a graph still needs stays with that graph."""
        self._memory.close()
        self._memory, self._last = self._new_memory(), None

    def takes(self, leaf: Any) -> bool:
        """True if an argument is kept in a record: floating-point tensors, but no parameters and other subclasses."""
        return (
            type(leaf) is Tensor
            and leaf.is_floating_point()
            and leaf.layout == torch.strided
            and not leaf.is_meta
            and leaf.numel() >= max(1, self.parts)
        )

    def keep(self, tensors: Sequence[Tensor]) -> KeptRecord:
        """Copy this rank's part of each tensor.

        Args:
            tensors: At least one, all on one device, of which `takes` holds.

        Raises:
            ValueError: If the contiguous buffer has no room for them.
        """
        pieces: list[_Piece] = []
        end = 0
        for tensor in tensors:
            numel = -(-tensor.numel() // self.parts)
            # Kernels may give other bits for other strides.
            stride = tuple(torch.empty_like(tensor, device="meta").stride())
            pieces.append(_Piece(tuple(tensor.shape), stride, tensor.dtype, numel, end))
            end += -(-pieces[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
        device = tensors[0].device
        self._leaving.look()
        layout = f"{', '.join(f'{piece.dtype} {list(piece.shape)}' for piece in pieces)} on {device}"
        memory = self._memory.take(end, device, layout)
        previous = None if self._last is None else self._last()
        record = KeptRecord(self, memory, pieces, device, previous)
        # At exit there is no later record to lend to.
        weakref.finalize(record, self._memory.free, memory).atexit = False
        if record.copies is not None:
            record.copies.leaving.begin_group(_LEAVING)
            record.copies.returning.end_all()  # of a backward that did not use all of it
        with torch.no_grad():
            record.fill(tensors)
        self._records.add(record)
        self._last = weakref.ref(record)
        return record

    def copies(self, device: torch.device) -> _Copies | None:
        """The queue of a device that copies to the host and back; None where nothing is asynchronous."""
        if not self.on_host:
            return None
        if device not in self._copies:
            streams = streams_of(device)
            self._copies[device] = None if streams is None else _Copies(streams)
        return self._copies[device]

    def gather(self, own: Tensor, piece: _Piece) -> Tensor:
        """The whole input of a rank's part, which is bytes on the input's device."""
        if self.parts == 1:
            whole = own.view(piece.dtype)
        else:
            flat = own.new_empty(piece.nbytes * self.parts)
            flat.chunk(self.parts)[self.part].copy_(own)
            self._communicator.all_gather(flat).wait()
            whole = flat.view(piece.dtype)
        return whole.as_strided(piece.shape, piece.stride)


class KeptRecord:
    """Tensors that one checkpoint keeps. Made by `KeptInputs.keep`.

    Attributes:
        nbytes: Of memory.
    """

    def __init__(
        self,
        kept: KeptInputs,
        memory: Tensor,
        pieces: Sequence[_Piece],
        device: torch.device,
        previous: KeptRecord | None,
    ) -> None:
        self._kept, self._memory, self._pieces, self._device = kept, memory, list(pieces), device
        # A record lives as long as its own graph, and not as long as the next one's.
        self._previous = None if previous is None else weakref.ref(previous)
        self.copies = kept.copies(device)
        self._ahead: Tensor | None = None
        self._returning: HeldCopy | None = None
        self.nbytes = memory.numel()

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy this rank's parts in."""
        copies = self.copies
        with nullcontext() if copies is None else copies.begin():
            for piece, tensor in zip(self._pieces, tensors, strict=True):
                flat = _in_memory_order(tensor.detach())
                rank = self._kept.part
                part = flat[rank * piece.numel : (rank + 1) * piece.numel]
                place = self._bytes(self._memory, piece).view(piece.dtype)
                # Parts at the end may be shorter than their place, or empty.
                place[: part.numel()].copy_(part, non_blocking=copies is not None)
        if copies is not None:  # the tensors, for `flat` may be a copy that the stream itself made
            event = copies.stream.record_event()
            for tensor in tensors:
                copies.leaving.hold(tensor.detach(), event)

    def fetch(self, number: int) -> Tensor:
        """One of the inputs, whole, as it was, in memory of its own; the group's ranks call it together."""
        piece = self._pieces[number]
        self.start()
        assert self._ahead is not None
        if self.copies is not None and self._returning is not None:
            self.copies.leaving.end_all()  # backward has begun
            self.copies.returning.use(self._returning, self._ahead)
        whole = self._kept.gather(self._bytes(self._ahead, piece), piece)
        # torch asks for the inputs in order, so nobody needs the copy after the last.
        if number == len(self._pieces) - 1:
            self._ahead = None
        # One record ahead, so that its copy runs beside this one's recomputation.
        before = None if self._previous is None else self._previous()
        if before is not None and before._ahead is None and self._kept.on_host:
            self._kept.prefetches += 1
            before.start()
        return whole

    def start(self) -> None:
        """Begin to copy the record to the device, unless that has been done."""
        if self._ahead is not None:
            return
        # Outside of the copies' stream: the computing stream takes the memory, and frees it.
        self._ahead = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        copies = self.copies
        with nullcontext() if copies is None else copies.begin():
            self._ahead.copy_(self._memory, non_blocking=copies is not None)
        if copies is not None:
            copies.returning.begin_group(_LEAVING)
            self._returning = copies.returning.hold(self._ahead, copies.stream.record_event())

    @staticmethod
    def _bytes(memory: Tensor, piece: _Piece) -> Tensor:
        return memory[piece.start : piece.start + piece.nbytes]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """All elements, 1-D, as they lie; of a tensor with gaps or overlaps in logical order."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    return torch.empty_like(tensor).copy_(tensor).as_strided((tensor.numel(),), (1,))
