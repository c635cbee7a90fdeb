"""Memory for kept inputs: where the bytes of one checkpoint's inputs, its record, lie until its backward."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.memory.host_memory import HostMemory


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
        """Nobody needs these bytes any more."""
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


class HostArena:
    """Each record is host memory of its size in whole pages, page-locked for copies from a GPU, used again afterwards.

    Locking pages takes longer than filling them, so what a step needed stays for the next one. Where records change
    their size from step to step, one that is large enough serves, and what is too small goes: there are never more of
    them than were needed at one time.
    """

    def __init__(self) -> None:
        self._locks = True
        self._free: dict[bool, list[HostMemory]] = {False: [], True: []}
        self._lent: dict[int, tuple[bool, HostMemory]] = {}

    def take(self, nbytes: int, device: torch.device, layout: str) -> Tensor:
        """Memory of an earlier record, or new memory."""
        pinned = device.type == "cuda" and self._locks
        free = self._free[pinned]
        fitting = [memory for memory in free if memory.nbytes >= nbytes]
        if fitting:
            memory = min(fitting, key=_size)
        elif free:
            memory = max(free, key=_size)
        if free:
            free.remove(memory)
        if not fitting:
            memory = _host(nbytes, pinned)
            self._locks &= memory.pinned or not pinned  # where it failed the next ones need not try
        self._lent[memory.bytes.data_ptr()] = pinned, memory
        return memory.bytes[:nbytes]

    def free(self, memory: Tensor) -> None:
        """Keep it for a later record."""
        pinned, whole = self._lent.pop(memory.data_ptr())
        self._free[pinned].append(whole)

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
    """

    def __init__(self, number: int, on_host: bool) -> None:
        self._number, self._on_host = number, on_host
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

    @property
    def reserved_bytes(self) -> int:
        """Of the buffer."""
        return 0 if self._buffer is None else self._number * self._slot_bytes

    def _make(self, nbytes: int, device: torch.device, layout: str) -> None:
        total = self._number * nbytes
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
