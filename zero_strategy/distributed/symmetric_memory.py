"""A buffer in memory that all ranks of a group can address, for collectives that need that.

torch offers it on GPUs that reach each other (NVLink). Everywhere else there is none, and whoever asks gets None and
takes ordinary memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.runtime.torch_private import symmetric_memory

logger = logging.getLogger(__name__)


class GlobalSymmetricMemoryBuffer:
    """One such buffer, of which tensors are the beginning; one tensor is in use at a time. A collective.

    Args:
        size_in_mb: Its size in units of 2**20 bytes.
        process_group: The ranks, all of which make it.

    Attributes:
        symm_buffer: The bytes (1-D uint8), or None where there is no symmetric memory.
        symm_mem_hdl: torch's handle, for collectives; or None.
        reason: Why there is none.

    Raises:
        ValueError: If the size is not positive.
    """

    def __init__(self, size_in_mb: float, process_group: dist.ProcessGroup | None) -> None:
        if not size_in_mb > 0:
            raise ValueError(f"size_in_mb must be positive, not {size_in_mb}")
        self.symm_buffer: Tensor | None = None
        self.symm_mem_hdl: Any = None
        self.reason = _unavailable(process_group)
        if self.reason is None:
            try:
                self._open(int(size_in_mb * 2**20), process_group)
            except (RuntimeError, ImportError) as error:  # the driver's word: no fabric, no access between peers
                self.symm_buffer = self.symm_mem_hdl = None
                self.reason = f"{type(error).__name__}: {error}"
        if self.reason is not None:
            logger.info("no symmetric memory: %s", self.reason)

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The beginning of the buffer in the asked-for shape; None if it is too small, or there is none."""
        numel = prod(tensor_shape)
        if not self._can_allocate(numel, dtype):
            return None
        return self._allocate(numel, dtype).view(tuple(tensor_shape))

    def _can_allocate(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether so many elements fit."""
        return self.symm_buffer is not None and numel * dtype.itemsize <= self.symm_buffer.numel()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first so many elements, 1-D; ask `_can_allocate` first."""
        assert self.symm_buffer is not None
        return self.symm_buffer[: numel * dtype.itemsize].view(dtype)

    def _open(self, nbytes: int, group: dist.ProcessGroup | None) -> None:
        symmetric = symmetric_memory()
        device = torch.device("cuda", torch.cuda.current_device())
        buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.symm_mem_hdl = symmetric.rendezvous(buffer, group or dist.group.WORLD)
        self.symm_buffer = buffer


def _unavailable(group: dist.ProcessGroup | None) -> str | None:
    """What is known before anything is tried; the same on all ranks of one kind of machine."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not dist.is_initialized():
        return "torch.distributed is not initialized"
    if "nccl" not in dist.get_backend(group):
        return f"the group's backend is {dist.get_backend(group)}"
    return None
