"""Memory for whole gradients that goes from one bucket to the next within a backward.

On the CPU new memory is paid for page by page when it is first written to: a tenth of a step of a small model. Nothing
is kept between backwards, and never more than what the last bucket gave back.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BufferReuse:
    """What buckets gave back; it is of use only while a backward runs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._open = False

    def open(self) -> None:
        """A backward begins."""
        self._open = True

    def close(self) -> None:
        """A backward has ended: memory goes."""
        self._open = False
        self._free.clear()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A buffer with whatever is in it; None if there is none of this kind."""
        if self._free and (self._free[-1].numel(), self._free[-1].dtype, self._free[-1].device) == (
            numel, dtype, device
        ):  # fmt: skip
            return self._free.pop()
        self._free.clear()
        return None

    def give(self, buffer: Tensor) -> None:
        """Nobody uses a buffer any more."""
        if self._open:
            self._free.append(buffer)
