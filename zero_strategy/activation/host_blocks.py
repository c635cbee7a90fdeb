"""Blocks of host memory for activations: each of the size that is asked for, used again for the next of that size."""

from __future__ import annotations

import warnings

from zero_strategy.memory.host_memory import HostMemory


class HostBlocks:
    """Gives and takes back blocks; those that a whole pass did without are given up.

    Args:
        pinned: Page-lock them for copies from and to a CUDA device.

    Attributes:
        taken: Bytes of all blocks, whole pages.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[tuple[int, HostMemory]]] = {}
        self._pass = self._lent = 0
        self.taken = 0

    def take(self, nbytes: int) -> HostMemory:
        """A block for `nbytes`, with whatever is in it."""
        if not self._lent:
            self._begin_pass()
        self._lent += 1
        rounded = HostMemory.rounded(nbytes)
        free = self._free.get(rounded)
        if free:
            return free.pop()[1]
        memory = HostMemory(nbytes, pinned=self._pinned)
        if self._pinned and not memory.pinned:
            self._pinned = False
            warnings.warn(
                f"offload.activations: copies wait for pageable memory: {memory.reason} (see `ulimit -l`)",
                stacklevel=2,
            )
        self.taken += memory.nbytes
        return memory

    def give_back(self, memory: HostMemory) -> None:
        """A block that nobody needs any longer; the device's copies from and to it may still be under way."""
        self._lent -= 1
        self._free.setdefault(memory.nbytes, []).append((self._pass, memory))

    def _begin_pass(self) -> None:
        """Nothing is lent: drop what the pass before did not need."""
        self._pass += 1
        for size, blocks in list(self._free.items()):
            used = [block for block in blocks if block[0] >= self._pass - 1]
            self.taken -= size * (len(blocks) - len(used))
            self._free[size] = used
            if not used:
                del self._free[size]
