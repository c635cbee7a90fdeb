"""A rank of a pipeline on a device on paper: what the host waits for, and in which order streams touch tensors.

Both ranks of two run here, one after the other: the last stage's with the activations that the first one would send,
then the first stage's with the gradients that the last one has sent.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.device.fake_ranks import fake_world
from tests.device.recorder import Event, Recorder
from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.offload import tier
from zero_strategy.pipeline import build_table, device_payloads, lower, peers
from zero_strategy.pipeline.device_payloads import DevicePayloads
from zero_strategy.pipeline.executor import Executor
from zero_strategy.pipeline.lowering import read_orders
from zero_strategy.pipeline.messages import Channel, Stamp, kind_of, take_apart
from zero_strategy.pipeline.point_to_point import PointToPoint, _Sender
from zero_strategy.pipeline.schedules import Placement
from zero_strategy.pipeline.transport import Inlet, Outlet
from zero_strategy.watchdog.diagnosis import FailureBoard
from zero_strategy.watchdog.waits import BoundedWaits

CPU = torch.device("cpu")
MICRO_BATCHES, WIDTH = 4, 8
Wire = defaultdict[tuple[int, int, int], "deque[Tensor]"]
"""What has been sent, by sender, receiver and tag; tag -1: from device to device."""


class HostGroup:
    """Connections of the host, to ranks that have already sent all."""

    on_device = False

    def __init__(self, own: int, wire: Wire, outside: list[str]) -> None:
        self._own, self._wire, self._outside = own, wire, outside
        self.waits: BoundedWaits | None = None

    def send(self, buffer: Tensor, to: int, tag: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            self._wire[self._own, to, tag].append(buffer.clone())
        return HostWork(self, "a send")

    def receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            buffer.copy_(self._wire[source, self._own, tag].popleft())
        return HostWork(self, "a receive")

    def waited(self, what: str) -> None:
        """The host waits for another rank, and somebody should watch that."""
        assert self.waits is not None
        if self.waits._waiting is None:
            self._outside.append(what)

    def ask(self, peer: int) -> None:
        pass


class HostWork:
    def __init__(self, group: HostGroup, what: str) -> None:
        self._group, self._what = group, what

    def wait(self) -> None:
        self._group.waited(self._what)


class DeviceGroup:
    """Connections of the device: transfers on a stream of their own, as the library's."""

    on_device = True

    def __init__(self, own: int, wire: Wire, recorder: Recorder) -> None:
        self._own, self._wire, self._recorder = own, wire, recorder
        self._stream = recorder.new()

    def send(self, buffer: Tensor, to: int, tag: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            self._wire[self._own, to, -1].append(buffer.clone())
        return self._queue("a send", [buffer], [])

    def receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            buffer.copy_(self._wire[source, self._own, -1].popleft())
        return self._queue("a receive", [], [buffer])

    def _queue(self, what: str, read: list[Tensor], written: list[Tensor]) -> DeviceWork:
        self._stream.wait_stream(self._recorder.current())
        self._recorder.operation(what, read, written, self._stream.name)
        return DeviceWork(self._recorder, self._stream.record_event())


class DeviceWork:
    def __init__(self, recorder: Recorder, event: Event) -> None:
        self._recorder, self._event = recorder, event

    def wait(self) -> None:
        self._recorder.current().wait_event(self._event)


class OneSided(PointToPoint):
    """The transport of one rank; all that it does is the product's, but for the connections."""

    def __init__(self, rank: int, channels: list[Channel], wire: Wire, recorder: Recorder, outside: list[str]) -> None:
        self.ranks, self.rank, self.counters = [0, 1], rank, CommunicationCounters()
        group, board = HostGroup(rank, wire, outside), FailureBoard(None, "test")
        self.waits = BoundedWaits(rank, f"stage {rank}", [], board, 20.0, 20.0)
        group.waits = self.waits
        groups: Any = dict.fromkeys(channels, group)
        self._groups = groups
        self._senders = {groups[channels[0]]: _Sender(self.waits.break_connections)}
        ways: Any = {way: DeviceGroup(rank, wire, recorder) for way in device_payloads.ways_of(channels)}
        self._payloads = DevicePayloads(ways, rank, CPU, self.waits, self._awaited, group.ask)


@contextmanager
def _device(rank: int, wire: Wire, outside: list[str]) -> Iterator[Recorder]:
    recorder = Recorder()

    def connected(ranks: Any, channels: list[Channel], **settings: Any) -> OneSided:
        return OneSided(rank, channels, wire, recorder, outside)

    with pytest.MonkeyPatch.context() as patch, fake_world(rank, 2):
        patch.setattr(tier, "streams_of", lambda device: recorder)
        patch.setattr(device_payloads, "streams_of", lambda device: recorder)
        patch.setattr(peers, "goes_beside", lambda device: True)
        patch.setattr(peers, "PointToPoint", connected)
        yield recorder


def _stage(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _inputs() -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(3 if micro_batch else 5, WIDTH) for micro_batch in range(MICRO_BATCHES)]


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def _send_activations(wire: Wire, recorder: Recorder, outside: list[str], program: int) -> Outlet:
    """As the first stage; what is sent lives as long as what this returns."""
    forward, end = Channel(0, 1, 0), Channel(0, 1, 3)
    transport, stage = OneSided(0, [forward, Channel(1, 0, 1), end], wire, recorder, outside), _stage(0)
    outlet = Outlet(transport, forward, "activation", CPU, beside=True)
    for micro_batch, x in enumerate(_inputs()):
        with torch.no_grad():
            tensors, structure = take_apart(stage(x))
        kinds = [kind_of(tensor, True) for tensor in tensors]
        outlet.send(Stamp(1, program, micro_batch, micro_batch), structure, kinds, tensors)
    Outlet(transport, end, "end", CPU).send(Stamp(1, program, MICRO_BATCHES - 1, 0), ["v", None], [], [])
    return outlet


class Ran:
    """Both ranks' runs.

    Attributes:
        recorders: Of the last stage's rank, and of the first one's.
        outside: Waits for other ranks that nobody watched.
        stages: By rank.
        calls: Messages by kind, of each rank.
        losses: By rank.
    """

    def __init__(self, schedule: str = "1f1b", loss: Callable[[Tensor, Tensor], Tensor] = _loss) -> None:
        wire: Wire = defaultdict(deque)
        self.outside: list[str] = []
        self.recorders: list[Recorder] = []
        self.stages = [_stage(0), _stage(1)]
        self.calls: dict[int, Counter[str]] = {}
        self.losses: dict[int, float] = {}
        schedules, placement = lower(build_table(schedule, 2, MICRO_BATCHES, 1)), Placement(2)
        for rank in (1, 0):
            with _device(rank, wire, self.outside) as recorder:
                program = zlib.crc32(read_orders(schedules[rank], placement, rank).title.encode())
                if rank == 1:
                    sending = _send_activations(wire, recorder, [], program)
                executor = Executor([self.stages[rank]], placement, loss_fn=loss, timeout=20.0)
                data = iter([(x, torch.zeros(len(x), WIDTH)) for x in _inputs()])
                with recorder:
                    result = executor.run(schedules[rank], data)
                assert result.loss is not None
                self.losses[rank] = float(result.loss)
                assert executor.counters is not None
                self.calls[rank] = Counter(executor.counters.calls)
                executor.close()
            self.recorders.append(recorder)
        del sending


def _alone() -> tuple[float, list[nn.Module]]:
    stages = [_stage(0), _stage(1)]
    total = 0.0
    for x in _inputs():
        loss = _loss(stages[1](stages[0](x)), torch.zeros(len(x), WIDTH)) / MICRO_BATCHES
        loss.backward()
        total += float(loss.detach())
    return total, stages


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_host_waits_for_other_ranks_in_one_place_and_for_the_device_nowhere(schedule: str) -> None:
    ran, (loss, stages) = Ran(schedule), _alone()
    for recorder in ran.recorders:
        assert not recorder.syncs and not recorder.races
    assert not ran.outside
    assert ran.losses == {0: pytest.approx(loss), 1: pytest.approx(loss)}
    for mine, expected in zip(ran.stages, stages, strict=True):
        for own, other in zip(mine.parameters(), expected.parameters(), strict=True):
            assert own.grad is not None and other.grad is not None
            torch.testing.assert_close(own.grad, other.grad)


def test_only_tensors_go_from_device_to_device() -> None:
    """One message of the host for each, and the tensors; the loss and the end of the batch by the host alone."""
    calls = Ran().calls
    assert calls[0] == {"activation": MICRO_BATCHES, "control": MICRO_BATCHES, "end": 1}
    assert calls[1] == {"gradient": MICRO_BATCHES, "control": MICRO_BATCHES, "loss": 1}


def test_two_communicators_for_each_pair_of_neighbours_however_many_stages_they_have() -> None:
    """Those that have a pair in common connect it in one order, by which nobody waits in a circle."""
    for ranks, chunks in ((4, 1), (4, 3), (6, 2), (17, 2), (64, 1)):
        rank_of = [stage % ranks for stage in range(ranks * chunks)]
        steps = list(pairwise(rank_of))
        channels = [Channel(a, b, 2 * n) for n, (a, b) in enumerate(steps)]
        channels += [Channel(b, a, 2 * n + 1) for n, (a, b) in enumerate(steps)]
        ways = device_payloads.ways_of(channels)
        assert len(ways) == len(set(ways)) == 2 * (ranks - 1 + (chunks > 1))
        own = {rank: [way for way in ways if rank in way] for rank in range(ranks)}
        assert max(map(len, own.values())) <= 4
        done, rounds = 0, 0
        while done < len(ways):  # each rank makes its connections in order, together with the other one
            ready = [way for way in ways if all(own[rank] and own[rank][0] == way for rank in way)]
            assert ready
            for way in ready:
                for rank in way:
                    own[rank].pop(0)
            done, rounds = done + len(ready), rounds + 1
        assert rounds <= 8


# ---------------------------------------------------------------------------------------------- planted defects


def blocking_copy_of_a_header(patch: pytest.MonkeyPatch) -> None:
    """As it was: the header goes into the device's memory, and comes from there."""
    receive = Inlet._receive_payload

    def read_first(self: Inlet, *args: Any) -> Any:
        arrival = receive(self, *args)
        if arrival.work is not None:
            arrival.work.wait()
            arrival.buffer[:1].cpu()
        return arrival

    patch.setattr(Inlet, "_receive_payload", read_first)


def loss_read_at_once(patch: pytest.MonkeyPatch) -> None:
    fetch = peers.PipelinePeers._fetch

    def item(self: Any, loss: Tensor) -> Any:
        loss.item()
        return fetch(self, loss)

    patch.setattr(peers.PipelinePeers, "_fetch", item)


def wait_outside_of_the_watched_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedWaits, "wait", lambda self, work, awaited: work.wait())


def tensors_used_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceWork, "wait", lambda self: None)


def tensors_changed_while_they_are_sent(patch: pytest.MonkeyPatch) -> None:
    def reused(self: Outlet, nbytes: int) -> Tensor:
        while self._leaving:
            _, payload = self._leaving.popleft()
            if payload.numel() == nbytes:
                return payload
        return torch.empty(nbytes, dtype=torch.uint8, device=CPU)

    patch.setattr(Outlet, "_payload_buffer", reused)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (blocking_copy_of_a_header, "syncs"),
        (loss_read_at_once, "syncs"),
        (wait_outside_of_the_watched_place, "outside"),
        (tensors_used_before_they_are_there, "races"),
        (tensors_changed_while_they_are_sent, "races"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_pipeline_messages_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    ran = Ran()
    seen = {
        "syncs": [sync for recorder in ran.recorders for sync in recorder.syncs],
        "races": [race for recorder in ran.recorders for race in recorder.races],
        "outside": ran.outside,
    }
    assert seen[found]
