"""Slices of a device on their way to the thread that codes their changes: one copy each, for which no step waits.

Copies go to page-locked memory that is used again, beside what the device computes. Former values are copied before a
step may change them; new ones may be on their way until the next step, which waits for their coding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.comm.delta import Words, words_of
from zero_strategy.offload.tier import DeviceCopies, HostMemory, Landing
from zero_strategy.runtime.compute_device import beside_captures


class Place(Protocol):
    """Consecutive elements of a slice."""

    @property
    def offset(self) -> int: ...

    @property
    def numel(self) -> int: ...


class SliceCopy:
    """A copy of consecutive elements of a slice.

    Args:
        room: The memory of the host.
        values: The elements in it.
        first: The first one, counted from the slice's start.
        landing: The copy's end.
    """

    def __init__(self, room: HostMemory, values: Tensor, first: int, landing: Landing) -> None:
        self.room, self._values, self._first, self._landing = room, values, first, landing

    def wait(self) -> None:
        """Return when the values are there; another thread may capture a CUDA graph meanwhile."""
        with beside_captures():
            self._landing.on_host()

    def let_change(self) -> None:
        """Let what is computed from now on, which may change the elements, wait for the copy; the host does not."""
        self._landing.on_device()

    def words(self, places: Sequence[Place]) -> Iterator[Words]:
        """The values of these places, which are there."""
        for each in places:
            begin = each.offset - self._first
            yield words_of(self._values[begin : begin + each.numel])


class SliceCopies:
    """Copies from one device, and the memory that they go to.

    Args:
        device: The device.

    Attributes:
        at_once: Nothing is on its way: the device is the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = DeviceCopies(device)
        self.at_once = self._copies.at_once
        self._free: list[HostMemory] = []
        self._pinned = True

    def begin(self, values: Tensor, first: int, dtype: torch.dtype) -> SliceCopy:
        """Begin to copy elements of a slice.

        Args:
            values: The elements, flat, on the device.
            first: The first one, counted from the slice's start.
            dtype: Of the copy.
        """
        values = values.to(dtype)
        room = self._room(values.nbytes)
        held = room.bytes[: values.nbytes].view(dtype)
        return SliceCopy(room, held, first, self._copies.down(values, held))

    def give_back(self, copy: SliceCopy) -> None:
        """Let the memory be used again, by copies that come after this one."""
        self._free.append(copy.room)

    def close(self) -> None:
        """Give all memory up; no copy is under way."""
        self._free.clear()

    def _room(self, nbytes: int) -> HostMemory:
        """The smallest one that is free and large enough."""
        fitting = [room for room in self._free if room.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda room: room.nbytes)
            self._free.remove(found)
            return found
        room = HostMemory(nbytes, pinned=self._pinned)
        if self._pinned and not room.pinned:
            self._pinned = False  # a limit on locked memory would refuse the next ones, too
            warnings.warn(
                f"publish(): steps wait for copies to pageable memory: {room.reason} (see `ulimit -l`)", stacklevel=2
            )
        return room
