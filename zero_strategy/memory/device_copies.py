r"""Copies between a device and the host, on streams of their own, so that the device goes on computing meanwhile.

    computing   ... | gradients |      ...        | forward reads weights
                         \                        ^
    down                  copy -> host waits       |
    up                             copy, from host-+ (computing waits for it, the host does not)

A copy begins when what is queued on the device at that moment is done. On the CPU copies are made at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """What copies need of a device's queues. Streams and events have the methods of CUDA's in torch."""

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


class Landing:
    """The end of a copy, to be waited for by whoever uses what has been copied, or changes what it was copied from."""

    def __init__(self, streams: Streams | None = None, event: Any = None) -> None:
        self._streams, self._event = streams, event

    def on_host(self) -> None:
        """Return when it has ended."""
        if self._event is not None:
            self._event.synchronize()

    def on_device(self) -> None:
        """Let what this thread queues on the device from now on wait for it."""
        if self._streams is not None:
            self._streams.current().wait_event(self._event)


class DeviceCopies:
    """Copies from and to one device.

    Args:
        device: The device.
        streams: Its queues; default: a CUDA device's own, on the CPU none.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._streams = CudaStreams(device) if streams is None and device.type == "cuda" else streams
        self._down: Any = None
        self._up: Any = None

    def down(self, source: Tensor, target: Tensor) -> Landing:
        """Begin to copy from the device to memory of the host, which holds the values when that has landed there."""
        if self._streams is None:
            target.copy_(source)
            return Landing()
        if self._down is None:
            self._down = self._streams.new()
        return self._copy(self._streams, self._down, source, target, source)

    def up(self, source: Tensor, target: Tensor) -> Landing:
        """Begin to copy from memory of the host, which stays as it is until that has landed, to the device."""
        if self._streams is None:
            target.copy_(source)
            return Landing()
        if self._up is None:
            self._up = self._streams.new()
        return self._copy(self._streams, self._up, source, target, target)

    @staticmethod
    def _copy(streams: Streams, stream: Any, source: Tensor, target: Tensor, on_device: Tensor) -> Landing:
        stream.wait_stream(streams.current())
        with streams.within(stream):
            target.copy_(source, non_blocking=True)
        streams.keep(on_device, stream)
        return Landing(streams, stream.record_event())
