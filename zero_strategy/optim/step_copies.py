"""What a step on the host takes from a device, one chunk ahead, and what it gives back while the next is updated.

    to the host     gradients of chunk i+1 (and weights, where there is no master copy)
    on the host     chunk i is updated
    to the device   new weights of chunk i-1

Memory is that of two chunks each way, page-locked where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_strategy.memory.device_copies import DeviceCopies, Landing
from zero_strategy.memory.host_memory import HostMemory

_ALIGNMENT = 64
_ROOMS = 2


@dataclass
class _Room:
    """Host memory for the tensors of one chunk, and the copies that use it."""

    memory: HostMemory | None = None
    landings: list[Landing] = field(default_factory=list)

    def tensors(self, like: Sequence[Tensor], pinned: bool) -> list[Tensor]:
        """Room for tensors like these, once no copy uses it any more."""
        for landing in self.landings:
            landing.on_host()
        self.landings = []
        begins, end = [], 0
        for tensor in like:
            begins.append(end)
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        if end and (self.memory is None or self.memory.nbytes < end):
            self.memory = HostMemory(end, pinned=pinned)
        return [
            torch.empty(0, dtype=tensor.dtype)
            if self.memory is None or not tensor.numel()
            else self.memory.bytes[begin : begin + tensor.numel() * tensor.itemsize].view(tensor.dtype)
            for begin, tensor in zip(begins, like, strict=True)
        ]


class StepCopies:
    """The copies of one optimizer's steps.

    Args:
        copies: Makes them.
        pinned: Page-lock memory for them.
    """

    def __init__(self, copies: DeviceCopies, pinned: bool) -> None:
        self._copies, self._pinned = copies, pinned
        self._down, self._up = [[_Room() for _ in range(_ROOMS)] for _ in range(2)]
        self._wanted: list[Sequence[Tensor]] = []
        self._arriving: list[list[Tensor]] = []
        self._taken = self._given = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that have been taken."""
        return sum(room.memory.nbytes for room in (*self._down, *self._up) if room.memory is not None)

    def begin(self, wanted: Sequence[Sequence[Tensor]]) -> None:
        """Before a step: flat tensors of the device that its chunks will ask for, chunk by chunk, in this order."""
        self._wanted, self._arriving, self._taken = list(wanted), [], 0
        self._fetch_until(1)

    def take(self) -> list[Tensor]:
        """What the next chunk asked for, in host memory; it stays until the chunk after it is taken."""
        number, self._taken = self._taken, self._taken + 1
        self._fetch_until(number + 1)
        for landing in self._down[number % _ROOMS].landings:
            landing.on_host()
        self._fetch_until(number + 2)
        return self._arriving[number]

    def _fetch_until(self, stop: int) -> None:
        for number in range(len(self._arriving), min(stop, len(self._wanted))):
            room = self._down[number % _ROOMS]
            self._arriving.append(room.tensors(self._wanted[number], self._pinned))
            pairs = zip(self._wanted[number], self._arriving[number], strict=True)
            room.landings = [self._copies.down(source, target) for source, target in pairs]

    def new_weights(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for a chunk's new weights, to be given with `give`."""
        self._given += 1
        return self._up[self._given % _ROOMS].tensors(like, self._pinned)

    def give(self, weights: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Begin to bring them to the device."""
        room = self._up[self._given % _ROOMS]
        room.landings = [self._copies.up(source, target) for source, target in zip(weights, targets, strict=True)]

    def end(self) -> None:
        """After a step: let the device wait for what was given, and want nothing more."""
        self._wanted, self._arriving = [], []
        for room in self._up:
            for landing in room.landings:
                landing.on_device()
