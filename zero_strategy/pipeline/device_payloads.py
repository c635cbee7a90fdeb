"""Tensors of messages between stages, from device to device, beside the messages of the host that describe them.

    host      header k -->  header k+1 -->             gloo: bounded, watched, says what comes and how long it is
    device         [compute k][ send k ][compute k+1]  NCCL: exactly the bytes of the tensors

A transfer here holds the device, not the host: the host learns nothing from it, and reads nothing of it. What the host
has to know (headers, losses, the end of a batch) goes over the host. `BoundedWaits.follow` looks after every transfer,
so that a neighbour that is gone or has failed is named, wherever the host is then.

A pair of neighbours has two communicators, one for each direction. NCCL keeps one order per communicator, and a send
waits there for its receive. With one for both directions, two ranks that send to each other at the same time would wait
for ever: each receive stands behind a send. More are not needed: between two ranks, the messages of one direction have
the same order on both sides, however many stages a rank has (`lowering`). Each header has the number of its tensors'
buffer in that order, so that a schedule of another kind is an error before a byte lies in the wrong place.

Communicators are made when the transport is, by a first byte: NCCL makes them at their first use, and holds the caller
until the other rank comes to it, which in a schedule it need not do soon. All ranks go through their pairs in one order
of all pairs, so that nobody waits in a circle: pairs that begin at an even rank first, then the others, so that pairs
do not wait for all before them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.offload.tier import streams_of
from zero_strategy.pipeline.messages import Channel
from zero_strategy.runtime.torch_private import PrefixStore
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.waits import Awaited, BoundedWaits, Group

Way = tuple[int, int]
"""From a rank to another one, both among the transport's."""

_LOOK_SECONDS = 0.001


def ways_of(channels: Sequence[Channel]) -> list[Way]:
    """The ways that channels take, each once, in the order in which all ranks connect them."""
    ways = {(channel.source, channel.target) for channel in channels}
    return sorted(ways, key=lambda way: (min(way) % 2, min(way), max(way), way))


def device_groups(
    channels: Sequence[Channel], rank: int, seconds: float, place: Callable[[str], PrefixStore]
) -> dict[Way, Group]:
    """Carriers of tensors on this rank's ways, in the order of `ways_of`.

    Made by their class: `new_group` may give a group the name that a broken one of the same ranks had.

    Args:
        channels: Of all ranks.
        rank: This one.
        seconds: NCCL's own time-out.
        place: A part of the store, by name.
    """
    found = {}
    for source, target in ways_of(channels):
        if rank in (source, target):
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds)  # A backup: `BoundedWaits` ends first, and names the rank
            store = place(f"{source}-{target}")
            # Of the two, the sender has number 0 on both sides.
            found[source, target] = Group(
                dist.ProcessGroupNCCL(store, int(rank == target), 2, options), [source, target]
            )
    return found


class DevicePayloads:
    """Transfers between this rank's device and those of its neighbours.

    Args:
        groups: See `device_groups`.
        rank: This one, among the transport's ranks.
        device: Of the tensors.
        waits: How this rank waits.
        awaited: Makes what is waited for, of words and a rank among the transport's.
        ask: Raises a RuntimeError if a rank, among the transport's, is gone.
    """

    def __init__(
        self,
        groups: Mapping[Way, Group],
        rank: int,
        device: torch.device,
        waits: BoundedWaits,
        awaited: Callable[[str, int], Awaited],
        ask: Callable[[int], object],
    ) -> None:
        self._groups, self._rank, self._device, self._waits = groups, rank, device, waits
        self._awaited, self._ask = awaited, ask
        self._numbers: Counter[Way] = Counter()
        self._streams = streams_of(device)
        self._ends: Any = None
        """A stream on which nothing is but waits: its events come when transfers end, whatever is computed."""

    def connect(self) -> None:
        """Make the communicators, together with the neighbours.

        Raises:
            RankFailedError: If a neighbour does not come.
        """
        worker = BackgroundWorker(interrupt=self._waits.break_connections)
        for way, group in self._groups.items():
            # In a thread, as NCCL holds its caller until the neighbour comes; the wait here ends, too, when that one is
            # gone.
            made = worker.submit(partial(self._first_byte, way, group))

            def is_made() -> bool:
                return made.done() and made.result() is None  # noqa: B023 -- asked before the next one begins

            self._waits.wait_until(is_made, self._awaited("a connection of its device", self._other(way)))

    def next_number(self, channel: Channel) -> int:
        """Count a buffer on the way of a channel, which this rank is to send or to receive next; from 1."""
        self._numbers[channel[:2]] += 1
        return self._numbers[channel[:2]]

    def send(self, buffer: Tensor, channel: Channel) -> Any:
        """Begin to send; returns what the device can be made to wait for (`wait`) before the buffer changes."""
        # An error of a communicator that was broken here is then explained by the failure that was the reason.
        with self._waits.watching(self._awaited("room for tensors", channel.target)):
            work = self._groups[channel[:2]].send(buffer, channel.target, 0)
            self._follow(work, self._awaited("the receipt of tensors", channel.target), channel.target)
        return work

    def receive(self, buffer: Tensor, channel: Channel, awaited: Awaited) -> Any:
        """Begin to receive; returns what the device can be made to wait for (`wait`) before the buffer is used."""
        with self._waits.watching(awaited):
            work = self._groups[channel[:2]].receive(buffer, channel.source, 0)
            # Nobody may wait for this on the host: if the neighbour is gone, only the waits' thread can notice.
            self._follow(work, awaited, channel.source)
        return work

    def _follow(self, work: Any, awaited: Awaited, other: int) -> None:
        if self._streams is None:
            over = work.is_completed
        else:  # the work itself would hold the buffer until the host looks, long after the device is done with it
            self._ends = self._ends or self._streams.new()
            with self._streams.within(self._ends):
                work.wait()
            over = self._ends.record_event().query
        self._waits.follow(over, awaited, partial(self._ask, other))

    def _first_byte(self, way: Way, group: Group) -> None:
        # The current device is each thread's own, and the worker's would be the first GPU.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            if way[0] == self._rank:
                work = group.send(byte, way[1], 0)
            else:
                work = group.receive(byte, way[0], 0)
            # NCCL's own wait would hold a stream, not this thread; and the byte must live until it has gone.
            while not (work.is_completed() or self._waits.broken):
                time.sleep(_LOOK_SECONDS)

    def _other(self, way: Way) -> int:
        return way[0] if way[1] == self._rank else way[1]
