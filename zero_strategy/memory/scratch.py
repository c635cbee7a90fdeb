"""Named scratch buffers that are allocated once and used again: `GlobalMemoryBuffer`.

    scratch = GlobalMemoryBuffer()
    scratch.get_tensor((most, width), torch.bfloat16, "gathered")      # pre-sized: from now on the pointer is stable
    part = scratch.get_tensor((rows, width), torch.bfloat16, "gathered")

A buffer belongs to a name, a dtype and a device, and grows when more is asked for than it has. Nothing is cleared.
Two users of one name at one time share its memory, so they take names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
from torch import Tensor

Key = tuple[str, torch.dtype, torch.device]


class GlobalMemoryBuffer:
    """Scratch memory by name.

    Args:
        device: Where; default: the current CUDA device at each call, the CPU where there is none.

    Attributes:
        buffer: The whole 1-D buffers, by name, dtype and device.
    """

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self.buffer: dict[Key, Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """The beginning of the buffer of this name, in the asked-for shape; contiguous, with whatever it held before.

        Args:
            tensor_shape: Any shape, also of no elements.
            dtype: Of the elements; buffers of one name and two dtypes do not share memory.
            name: Whose buffer.
            mem_alloc_context: Makes a context to allocate in (a memory pool, say); entered only when memory is taken.

        Raises:
            ValueError: If a dimension is negative.
        """
        shape = tuple(tensor_shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"tensor_shape {list(shape)} of scratch buffer {name!r} has a negative dimension")
        needed = prod(shape)
        device = self._where()
        key = (name, dtype, device)
        held = self.buffer.get(key)
        if held is None or held.numel() < needed:
            # Given up first: the old and the new one would otherwise be there at the same time.
            held = None
            self.buffer.pop(key, None)
            with nullcontext() if mem_alloc_context is None else mem_alloc_context():
                held = self.buffer[key] = torch.empty(needed, dtype=dtype, device=device)
        return held[:needed].view(shape)

    def clear(self) -> None:
        """Give all buffers up; their memory is free once nobody holds a tensor of it."""
        self.buffer.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(held.numel() * held.element_size() for held in self.buffer.values())

    def _where(self) -> torch.device:
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
