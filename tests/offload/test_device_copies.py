"""Copies on streams of their own: what waits for what, told by streams that only take notes; the copies are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import VectorSpec
from zero_strategy.offload.tier import DeviceCopies, HostTier
from zero_strategy.optim.streamed import StepCopies

CPU = torch.device("cpu")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self._events += 1
        return Event(f"{self.name}.{self._events}", self._log)


class Noting:
    """Streams that take notes."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._made = 0
        self._computing = Stream("computing", self.log)

    def new(self) -> Stream:
        self._made += 1
        return Stream(f"copies {self._made}", self.log)

    def current(self) -> Stream:
        return self._computing

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"copy on {stream.name}")
        yield

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self.log.append(f"{tensor.numel()} elements kept for {stream.name}")

    def taken(self) -> list[str]:
        found, self.log[:] = list(self.log), []
        return found


def test_a_copy_waits_for_computing_and_is_waited_for_where_it_is_used() -> None:
    streams = Noting()
    copies = DeviceCopies(CPU, streams)
    device, host = torch.arange(3.0), torch.zeros(5)
    landing = copies.down(device, host[:3])
    begun = ["copies 1 waits for computing", "copy on copies 1", "3 elements kept for copies 1"]
    assert streams.taken() == begun and host.tolist() == [0, 1, 2, 0, 0]
    landing.on_host()
    assert streams.taken() == ["host waits for copies 1.1"]
    landing = copies.up(host, target := torch.empty(5))
    begun = ["copies 2 waits for computing", "copy on copies 2", "5 elements kept for copies 2"]
    assert streams.taken() == begun and torch.equal(target, host)
    landing.on_device()
    assert streams.taken() == ["computing waits for copies 2.1"]


def test_without_streams_copies_are_made_at_once() -> None:
    copies, target = DeviceCopies(CPU), torch.zeros(3)
    for copy in (copies.down, copies.up):
        landing = copy(torch.ones(3), target)
        assert target.sum() == 3
        landing.on_host()
        landing.on_device()
        target.zero_()


def shortened(log: list[str]) -> list[str]:
    """Copies and waits by direction: which copy begins, which is waited for by whom."""
    counts, found = dict[str, int](), []
    names = {"copies 1": "down", "copies 2": "up"}
    for line in log:
        if line.startswith("copy on"):
            stream = line.removeprefix("copy on ")
            counts[stream] = counts.get(stream, 0) + 1
            found.append(f"{names[stream]} {counts[stream]}")
        elif "waits for copies" in line:
            who, what = line.split(" waits for ")
            stream, number = what.split(".")
            found.append(f"{who} waits: {names[stream]} {number}")
    return found


def test_a_step_fetches_one_chunk_ahead_and_waits_for_as_little_as_it_may() -> None:
    streams, chunks = Noting(), 4
    step = StepCopies(DeviceCopies(CPU, streams), pinned=False)
    gradients = [torch.full((10 + n,), float(n)) for n in range(chunks)]
    weights = [torch.full((10 + n,), -1.0) for n in range(chunks)]
    for turn in range(2):
        step.begin([[gradient] for gradient in gradients])
        for number in range(chunks):
            (gradient,) = step.take()
            assert torch.equal(gradient, gradients[number])
            (new,) = step.new_weights([weights[number]])
            new.copy_(gradient + turn)
            step.give([new], [weights[number]])
        step.end()
        assert all(torch.equal(value, gradient + turn) for value, gradient in zip(weights, gradients, strict=True))
        log = shortened(streams.taken())
        if turn == 0:
            assert log == [
                "down 1",
                "host waits: down 1", "down 2", "up 1",
                "host waits: down 2", "host waits: down 1", "down 3", "up 2",
                "host waits: down 3", "host waits: down 2", "down 4", "host waits: up 1", "up 3",
                "host waits: down 4", "host waits: up 2", "up 4",
                "computing waits: up 4", "computing waits: up 3",
            ]  # fmt: skip
    assert step.nbytes == 4 * 4096


def test_tensors_of_a_chunk_do_not_meet() -> None:
    step = StepCopies(DeviceCopies(CPU), pinned=False)
    wanted: list[list[Tensor]] = [
        [torch.arange(3, dtype=torch.bfloat16), torch.arange(1001.0), torch.empty(0)],
        [],
        [torch.tensor([7.0], dtype=torch.float64), torch.arange(5000.0)],
    ]
    step.begin(wanted)
    for expected in wanted:
        found: list[Any] = step.take()
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    step.end()


def note(looked: list[tuple[int, Tensor]], start: int, sums: Tensor) -> None:
    looked.append((start, sums))


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
def test_a_vector_added_to_on_the_device_has_the_same_bits(
    sums: torch.dtype, values: torch.dtype, factor: float
) -> None:
    found = []
    for copies in (None, DeviceCopies(CPU, Noting())):
        store = ChunkStore(HostTier(), 1000, copies=copies)
        (vector,) = store.add({"a": VectorSpec(2500, sums)}).values()
        torch.manual_seed(0)
        looked: list[tuple[int, Tensor]] = []
        for turn in range(3):
            looked.clear()
            given = torch.randn(2500).to(values)
            vector.add_all(given, first=not turn, factor=factor, look=partial(note, looked))
        assert sorted(start for start, _ in looked) == [0, 1000, 2000]
        assert torch.equal(
            torch.cat([chunk for _, chunk in sorted(looked, key=lambda one: one[0])]), vector.read(0, 2500)
        )
        found.append(vector.read(0, 2500))
    assert torch.equal(*found)


def test_a_whole_vector_goes_up_beside_what_is_computed() -> None:
    streams = Noting()
    store = ChunkStore(HostTier(), 1000, copies=DeviceCopies(CPU, streams))
    (vector,) = store.add({"a": VectorSpec(2500, torch.float32)}).values()
    vector.write(0, torch.arange(2500.0))
    vector.read_all(out := torch.empty(2500))
    assert torch.equal(out, torch.arange(2500.0))
    log = streams.taken()
    assert [line for line in log if line.startswith("copy")] == ["copy on copies 1"] * 3
    assert not [line for line in log if line.startswith("host") or "kept" in line]
    vector.read(0, 10)
    assert streams.taken() == []
    vector.write(0, torch.zeros(10))  # what is overwritten has to be there
    assert streams.taken() == ["host waits for copies 1.3"]
    vector.write(0, torch.zeros(10))
    assert streams.taken() == []
