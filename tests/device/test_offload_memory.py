"""Device memory of offloaded activations where the host runs ahead, by the allocator's own rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy.activation.kept_inputs as kept_inputs
import zero_strategy.activation.offload as offload
from tests.device.allocator import TimedDevice
from zero_strategy.activation.kept_inputs import KeptInputs
from zero_strategy.activation.offload import ActivationStore
from zero_strategy.activation.settings import CheckpointSettings
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import VectorSpec
from zero_strategy.offload.tier import DeviceCopies, HeldCopy, HeldForCopies, HostTier

CPU = torch.device("cpu")
UNITS, KEPT, NBYTES = 32, 4, 1 << 16
UNIT = KEPT * NBYTES
PLANNED = 2
"""Units whose part is on the device by the plan (`LayerCosts.in_tiers`)."""


class Sines(nn.Module):
    """Keeps so many tensors of one size for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(KEPT):
            x = x.sin()
        return x


def cost(stream: str, what: str, nbytes: int) -> int:
    """A unit computes longer than its memory is on its way; the host queues it in a fraction of either."""
    return 40 if stream == "computing" else 30


def train(device: TimedDevice, passes: int = 2) -> tuple[int, int]:
    """Bytes that the allocator has taken when all forwards, and when all backwards are queued."""
    store, unit = ActivationStore(CPU, frozenset()), Sines()
    most = [0, 0]
    with device:
        for _ in range(passes):
            y = x = torch.ones(NBYTES // 4, requires_grad=True, device=CPU)
            began = device.time(), device.time("computing")
            for _ in range(UNITS):
                with store.unit(unit):
                    y = unit(y)
            most[0] = max(most[0], device.reserved)
            queued, computed = device.time() - began[0], device.time("computing") - began[1]
            assert queued < computed / 4, "the host is no longer ahead"
            y.sum().backward()
            most[1] = max(most[1], device.reserved)
            expected = torch.ones(NBYTES // 4, requires_grad=True, device=CPU)
            z = expected
            with torch.utils._python_dispatch._disable_current_modes():
                for _ in range(UNITS * KEPT):
                    z = z.sin()
                z.sum().backward()
                assert torch.equal(x.grad, expected.grad)
            device.look()
            device.clock("the host")["time"] = device.time("computing")  # the end of a step is waited for
    return most[0], most[1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TimedDevice:
    found = TimedDevice(cost)
    monkeypatch.setattr(offload, "streams_of", lambda device: found)
    return found


def test_activations_beyond_the_plan_are_at_most_two_units(device: TimedDevice) -> None:
    forward, backward = train(device)
    assert forward <= (PLANNED + 2) * UNIT
    assert backward <= (PLANNED + 2) * UNIT
    assert not device.races and not device.syncs
    assert device.idle < 0.1 * device.time("computing")


def test_memory_kept_for_a_stream_that_the_host_has_left_behind_is_found(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `record_stream` does it: right, and most of what has left is still on the device."""

    def hold(self: HeldForCopies, tensor: Tensor, event: Any) -> HeldCopy:
        for stream in ("stream 1", "stream 2"):
            device._memory(tensor).kept.add(stream)
        copy = HeldCopy(tensor, event, device.current())
        copy.tensor = None
        return copy

    monkeypatch.setattr(HeldForCopies, "hold", hold)
    monkeypatch.setattr(HeldForCopies, "use", lambda self, copy, memory: device.current().wait_event(copy.event))
    forward, _ = train(device, passes=1)
    assert forward > 20 * UNIT


def keep(device: TimedDevice) -> int:
    """Bytes that the allocator has taken when as many records of inputs have been kept as there are units."""
    kept = KeptInputs(CheckpointSettings(checkpoint_in_cpu=True), Communicator(None, CommunicationCounters()))
    with device:
        x, records = torch.ones(NBYTES // 4, device=CPU), []
        for _ in range(UNITS):
            for _ in range(KEPT):
                x = x.sin()
            records.append(kept.keep([x]))
        for record in reversed(records):
            for _ in range(KEPT):
                x = x.sin()
            x = x + record.fetch(0)
    return device.reserved


def test_inputs_of_checkpoints_on_the_host_are_there_two_at_a_time(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_inputs, "streams_of", lambda _: device)
    assert keep(device) <= 6 * NBYTES
    assert not device.races and not device.syncs


@pytest.mark.parametrize("first", [True, False])
def test_gradients_on_their_way_down_are_those_of_one_bucket(device: TimedDevice, first: bool) -> None:
    """With the sum that they are added to; the buffers that they come from are used again at once."""
    store = ChunkStore(HostTier(), NBYTES // 16, copies=DeviceCopies(CPU, device))
    vectors = store.add({str(number): VectorSpec(NBYTES // 4, torch.float32) for number in range(UNITS)}).values()
    for vector in vectors:
        vector.write(0, torch.ones(NBYTES // 4))
    with device:
        buffer = torch.full((NBYTES // 4,), 0.5, device=CPU)
        for vector in vectors:
            buffer.mul_(1.0)  # as long as the copies take, or the device waits for them
            vector.add_all(buffer, first=first, factor=0.5)
        assert device.time() < device.time("computing") / 4, "the host is no longer ahead"
        assert device.reserved <= (1 + (1 if first else 2)) * NBYTES
        assert not device.syncs
        for vector in vectors:
            assert bool((vector.read(0, vector.numel) == (0.25 if first else 1.25)).all())
    assert not device.races
    store.close()
