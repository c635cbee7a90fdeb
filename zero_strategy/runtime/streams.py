"""Queues of a device: what all code that copies beside a computation asks of them, and CUDA's.

A copy begins when what is queued on the computing stream at that moment is done. Memory that one stream allocated and
another uses is kept for that other one, or the allocator would hand it out again too early.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """Needs of copies from a device's queues. Streams and events have the methods of CUDA's in torch."""

    def new(self) -> Any:
        """A stream."""

    def current(self) -> Any:
        """The stream on which this thread computes."""

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on a stream."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Let a tensor's memory not be used again before what is queued on the stream now is done."""


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> Any:
        """A stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        """The stream on which this thread computes."""
        return torch.cuda.current_stream(self._device)

    def within(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on a stream."""
        inside: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return inside

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Let a tensor's memory not be used again before what is queued on the stream now is done."""
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """The queues of a device; None where everything is done at once, as on the CPU."""
    return CudaStreams(device) if device.type == "cuda" else None
