"""CUDA devices on paper: how many a process sees, which one is current, on which memory is held; no memory, no work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class Gpus:
    """Torch's functions about devices, answered without any.

    Args:
        patch: Takes them back.
        seen: Number of GPUs.
        current: The current one.

    Attributes:
        current: See the argument.
        held: Bytes that this process holds on each, by index.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seen: int, current: int = 0) -> None:
        self.current, self.held = current, dict[int, int]()
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: seen)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", self._set)
        patch.setattr(torch.cuda, "device", self._within)
        patch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.held.get(device, 0))
        self._seen = seen

    def _set(self, device: torch.device | int) -> None:
        index = device.index if isinstance(device, torch.device) else device
        if not 0 <= index < self._seen:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current = index

    @contextmanager
    def _within(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self._set(device)
        try:
            yield
        finally:
            self.current = before
