"""Waits for another rank end in a sentence that names it, whatever the host waits in; what breaks has not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_strategy.pipeline.messages as messages
from zero_strategy.pipeline.messages import Channel, Stamp
from zero_strategy.pipeline.transport import Inlet
from zero_strategy.watchdog.diagnosis import Failure, FailureBoard
from zero_strategy.watchdog.waits import Awaited, BoundedWaits, RankFailedError

_SECONDS = 10.0
_AWAITED = Awaited("the tensors of the activation of micro-batch 2", "stage 0 (rank 0)", 0)


class Connections:
    """Of a device or the host; what waits for them ends when they are broken, as NCCL's kernels do."""

    on_device = True

    def __init__(self) -> None:
        self.broken = threading.Event()

    def abort(self) -> None:
        self.broken.set()


class Posted(FailureBoard):
    """A board on which another rank has posted."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__(None, "test")
        self._known = failure


def _waits(connections: Any, timeout: float = 60.0, failure: Failure | None = None) -> BoundedWaits:
    waits = BoundedWaits(1, "stage 1 (rank 1)", [connections], Posted(failure), timeout, timeout)
    waits.begin(1)
    return waits


def _gone() -> None:
    raise RuntimeError("Read error")


@pytest.mark.parametrize(
    ("timeout", "failure", "ask", "words"),
    [
        (60.0, None, _gone, "stage 0 (rank 0) is gone: its connection broke while stage 1 (rank 1) waited for the ten"),
        (60.0, Failure("raised", 0, "stage 0 (rank 0) raised ValueError", {}), _gone, "raised ValueError"),
        (2.0, None, lambda: None, "stage 1 (rank 1) has waited 2 s for the tensors of the activation of micro-batch 2"),
    ],
    ids=["dead", "failed", "hangs"],
)
def test_a_wait_for_a_device_that_waits_for_a_rank(
    timeout: float, failure: Failure | None, ask: Callable[[], None], words: str
) -> None:
    """As `.item()` in a user's loss function: the host waits for the device where we cannot watch it."""
    connections = Connections()
    waits = _waits(connections, timeout, failure)
    started = time.monotonic()
    waits.follow(connections.broken.is_set, _AWAITED, ask)
    assert connections.broken.wait(2 * _SECONDS)
    with pytest.raises(RankFailedError) as caught, waits.watching(Awaited("the loss", "stage 0 (rank 0)", 0)):
        pass  # what it read is of no use
    assert words in str(caught.value) and time.monotonic() - started < _SECONDS
    waits.stop()


def test_a_transfer_that_ends_with_its_connection_does_not_count() -> None:
    """A work of NCCL's is over, too, when its communicator was aborted."""
    connections = Connections()
    waits = _waits(connections, failure=Failure("raised", 0, "stage 0 (rank 0) raised ValueError", {}))
    waits.follow(connections.broken.is_set, _AWAITED)
    with pytest.raises(RankFailedError, match="raised ValueError"):
        waits.settle()
    waits.stop()


def test_transfers_end_in_their_order_and_hold_nobody_afterwards() -> None:
    waits, over = _waits(Connections()), [False, False]
    for number in range(2):
        waits.follow(lambda number=number: over[number], _AWAITED)  # type: ignore[misc]
    ending = threading.Timer(0.3, over.__setitem__, (0, True))
    ending.start()
    over[1] = True
    started = time.monotonic()
    waits.settle()
    assert 0.2 < time.monotonic() - started < _SECONDS and not waits.broken
    waits.settle()
    waits.stop()


class Silent:
    """A transport that brings nothing."""

    def __init__(self, waits: BoundedWaits, work: Any) -> None:
        self._waits, self._work = waits, work

    def post(self, buffer: torch.Tensor, channel: Channel) -> Any:
        return self._work

    def wait(self, work: Any, what: str, peer: str, channel: Channel) -> None:
        self._waits.wait(work, Awaited(what, peer, 0))


@pytest.mark.parametrize("holds", ["its wait", "its bytes"])
def test_a_header_that_does_not_come(holds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport's wait may return at once, as NCCL's, and the reading of what it brings hold the caller."""
    connections = Connections()
    waits = _waits(connections, timeout=2.0)

    class Work:
        def wait(self) -> None:
            if holds == "its wait":
                connections.broken.wait(2 * _SECONDS)
                raise RuntimeError("connection closed")

    def read(buffer: torch.Tensor, offset: int, length: int) -> bytes:
        connections.broken.wait(2 * _SECONDS)
        return b"\0" * 64

    monkeypatch.setattr(messages, "_read", read)
    transport: Any = Silent(waits, Work())
    inlet = Inlet(transport, Channel(0, 1, 0), "gradient", "stage 0 (rank 0)", "stage 1 (rank 1)", torch.device("cpu"))
    inlet.expect(1)
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"stage 1 \(rank 1\) has waited 2 s for the gradient of micro-batch 0"):
        inlet.take(Stamp(1, 0, 0, 0))
    assert time.monotonic() - started < _SECONDS
    waits.stop()
