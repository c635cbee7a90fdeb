"""State in host memory: pages of exactly the size that is needed, page-locked where there is a GPU to copy to."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor

from zero_strategy.memory.host_memory import HostMemory


class HostTier:
    """Records in host memory, which are used where they lie.

    Args:
        pinned: Page-lock them for copies from and to a CUDA device. torch's own pinned allocator would round every
            block up to a power of two, and keep what is given back.
    """

    name = "host"

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._records: dict[str, tuple[HostMemory, Tensor]] = {}

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room; the memory is zeroed, and taken when it is first written to."""
        for name, nbytes in sizes.items():
            memory = HostMemory(max(nbytes, 1), pinned=self._pinned)
            if self._pinned and not memory.pinned:
                self._pinned = False
                warnings.warn(
                    f"offloaded state stays in pageable memory, from which copies are slower: {memory.reason} (see "
                    "`ulimit -l`)",
                    stacklevel=2,
                )
            self._records[name] = memory, memory.bytes[:nbytes]

    def resident(self, record: str) -> Tensor | None:
        """The record itself."""
        return self._records[record][1]

    def read(self, record: str, memory: Tensor) -> Done:
        """Copy a record."""
        memory.copy_(self._records[record][1])
        return Done()

    def write(self, record: str, memory: Tensor) -> Done:
        """Replace a record."""
        self._records[record][1].copy_(memory)
        return Done()

    def staging(self, nbytes: int) -> Tensor:
        """Memory for reads and writes; nobody needs it here."""
        return HostMemory(nbytes).bytes

    def mark_torn(self, records: Iterable[str], reason: str) -> None:
        """Nothing: a record in memory says nothing of its past, as a tensor does not."""

    def is_torn(self, record: str) -> bool:
        """Never."""
        return False

    def release(self, records: Iterable[str]) -> None:
        """Give memory back, once nobody uses it."""
        for record in records:
            del self._records[record]

    def close(self) -> None:
        """Give all memory back."""
        self._records.clear()


class Done:
    """A read or a write that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""
