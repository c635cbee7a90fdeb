"""State in host memory: pages of exactly the size that is needed, page-locked where there is a GPU to copy to."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zero_strategy.memory.page_memory import page_memory


class HostTier:
    """Records in host memory, which are used where they lie.

    Args:
        pinned: Page-lock them for copies from and to a CUDA device. torch's own pinned allocator would round every
            block up to a power of two, and never give it back.
    """

    name = "host"

    def __init__(self, pinned: bool = False) -> None:
        self._pinned, self._records = pinned, dict[str, Tensor]()

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room; the memory is zeroed and taken when it is first written to."""
        for name, nbytes in sizes.items():
            memory = page_memory(nbytes)
            if self._pinned and nbytes:
                self._pinned = _register(memory)
            self._records[name] = memory

    def resident(self, record: str) -> Tensor | None:
        """The record itself."""
        return self._records[record]

    def read(self, record: str, memory: Tensor) -> Done:
        """Copy a record."""
        memory.copy_(self._records[record])
        return Done()

    def write(self, record: str, memory: Tensor) -> Done:
        """Replace a record."""
        self._records[record].copy_(memory)
        return Done()

    def release(self, records: Iterable[str]) -> None:
        """Give memory back."""
        for record in records:
            memory = self._records.pop(record)
            if self._pinned and memory.numel():
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def close(self) -> None:
        """Give all memory back."""
        self.release(list(self._records))


class Done:
    """A read or a write that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


def _register(memory: Tensor) -> bool:
    """Page-lock memory; where that is not permitted it stays pageable, which a warning says once."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) == 0:
        return True
    warnings.warn(
        f"{memory.numel()} bytes of offloaded state could not be page-locked (CUDA error {int(error)}; see "
        "`ulimit -l`): it stays in pageable memory, from which copies are slower",
        stacklevel=2,
    )
    return False
