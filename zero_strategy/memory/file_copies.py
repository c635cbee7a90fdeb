"""Copies in files of what is in memory, for as long as somebody else changes the original."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.tier import PendingIO, Tier, wait_all

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
