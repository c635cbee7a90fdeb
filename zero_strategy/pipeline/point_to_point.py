"""The transport between the ranks of a pipeline: messages of the host, and tensors of a device beside them.

Messages are sent while the ranks compute. Those to higher ranks and those to lower ones have a gloo group each: there
a connection carries one direction, so that none waits until another one has gone by. Channels on one connection are
told apart by tags. Tensors of a device go from device to device (`device_payloads`).

All that the host waits for here, it waits for in `BoundedWaits`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.comm.store import own_store
from zero_strategy.pipeline import device_payloads
from zero_strategy.pipeline.device_payloads import DevicePayloads
from zero_strategy.pipeline.messages import Channel
from zero_strategy.runtime.torch_private import PrefixStore, default_store
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.diagnosis import FailureBoard
from zero_strategy.watchdog.waits import Awaited, BoundedWaits, Group
from zero_strategy.watchdog.watchdog import Watchdog

_LARGE_BYTES = 1 << 20
"""Of a message that a thread posts: posting copies to the socket as much as it takes."""
_MOST_SMALL_BYTES = 32 << 20
"""Of small messages, until a thread lets go of those that have arrived."""
_BACKUP_SECONDS = 60.0
"""By which gloo's own time-out is longer than ours."""


class PointToPoint:
    """The transport between some ranks. Made, and made again after a failure, by all of them together.

    Args:
        ranks: World ranks that take part, in the order of their numbers here.
        channels: All that will be used, by any of them.
        beside: Those of them whose tensors go from device to device.
        device: Of these tensors.
        timeout: Seconds that a wait may take.
        patience: Seconds of a wait in which the other rank must come to this rank's batch.
        name: Tells transports of these ranks apart where not all make them in one order; equal on all ranks.
        title: This rank in words, for errors.
        watchdog: Of the engine; its failure is one of this transport, too.

    Attributes:
        rank: This rank's number among `ranks`.
        counters: Messages and bytes sent, by kind.
        waits: How this rank waits.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        channels: Sequence[Channel],
        *,
        beside: Sequence[Channel] = (),
        device: torch.device,
        timeout: float,
        patience: float,
        name: str,
        title: str,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.rank = self.ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        self.counters = CommunicationCounters()
        key = _unused_key(f"pipeline/{name}/{'-'.join(map(str, self.ranks))}", self.rank, len(self.ranks))
        # Ours is to end first: it names the stage and what was waited for.
        self._groups = _host_groups(self.ranks, channels, timeout + _BACKUP_SECONDS, key)
        on_device = {}
        if beside:
            seconds = timeout + _BACKUP_SECONDS
            on_device = device_payloads.device_groups(beside, self.rank, seconds, partial(_place, key))
        # Under the same key as the groups: what a failure before left on the board must not end this transport.
        board = FailureBoard(own_store(len(self.ranks)), key)
        groups = list(dict.fromkeys(self._groups.values()))
        self.waits = BoundedWaits(
            self.ranks[self.rank], title, [*groups, *on_device.values()], board, timeout, patience, watchdog
        )
        end = self.waits.break_connections
        # One for each direction: a message that waits for room holds up those of its own connection alone.
        self._senders = {group: _Sender(end) for group in groups}
        # For whoever lets go of it without `close`: the thread ends, and the watchdog hears of no wait any more.
        weakref.finalize(self, self.waits.stop)
        if groups:
            # The host's connection is asked: a device's does not tell that the other rank is gone.
            self._payloads = DevicePayloads(on_device, self.rank, device, self.waits, self._awaited, groups[0].ask)
            # Now: at the first message NCCL would hold the host until the other rank comes to it, too.
            self._payloads.connect()

    def post(self, buffer: Tensor, channel: Channel) -> Any:
        """Receive into a buffer what is sent next on a channel.

        Args:
            buffer: uint8, on the host; exactly as long as the message.

        Returns:
            To be given to `wait`.
        """
        # Gloo refuses at once on a broken connection: the error is explained as that of a wait.
        with self.waits.watching(self._awaited("a message", channel.source)):
            return self._groups[channel].receive(buffer, channel.source, channel.tag)

    def send(self, buffer: Tensor, channel: Channel, kind: str, done: Callable[[], None]) -> None:
        """Send a buffer.

        Args:
            buffer: uint8, on the host; unchanged until `done` is called.
            channel: From this rank.
            kind: Under which it is counted.
            done: Called, maybe in a thread, when the buffer is free.
        """
        self.counters.add(kind, buffer.numel(), 1)
        group = self._groups[channel]

        def post() -> Any:
            return group.send(buffer, channel.target, channel.tag)

        with self.waits.watching(self._awaited("room for a message", channel.target)):
            self._senders[group].send(post, buffer.numel(), done)

    def wait(self, work: Any, what: str, peer: str, channel: Channel) -> None:
        """Wait for what `post` has returned.

        Raises:
            RankFailedError: If it cannot come; names `peer` and `what`, or what has failed elsewhere.
        """
        self.waits.wait(work, Awaited(what, peer, self.ranks[channel.source]))

    def send_payload(self, buffer: Tensor, channel: Channel, kind: str) -> Any:
        """Send tensors from device to device, after the header that tells of them.

        Args:
            buffer: uint8, on the device.
            channel: From this rank.
            kind: Under which it is counted.

        Returns:
            Its `wait` lets the device wait until the buffer may change.
        """
        self.counters.add(kind, buffer.numel(), 1)
        return self._payloads.send(buffer, channel)

    def post_payload(self, buffer: Tensor, channel: Channel, what: str, peer: str) -> Any:
        """Receive tensors, of which a header has told, from device to device.

        Returns:
            To be given to `wait`, which lets the device wait.
        """
        return self._payloads.receive(buffer, channel, Awaited(what, peer, self.ranks[channel.source]))

    def payload_number(self, channel: Channel) -> int:
        """Number of the next buffer on the way of a channel, which this rank sends or receives; counts it."""
        return self._payloads.next_number(channel)

    def finish_sends(self) -> None:
        """Wait until everything is sent, and devices have sent and received all that was begun.

        Raises:
            RankFailedError: If not all of it can have arrived.
        """
        for sender in self._senders.values():
            # Under this rank's number, for they may be on their way to several neighbours.
            with self.waits.watching(Awaited("its messages to arrive", "a neighbour", self.ranks[self.rank])):
                sender.finish()
        self.waits.settle()

    def close(self) -> None:
        """End all connections."""
        self.waits.stop()
        self.waits.break_connections()

    def _awaited(self, what: str, rank: int) -> Awaited:
        return Awaited(what, f"rank {self.ranks[rank]}", self.ranks[rank])


class _Sender:
    """Posts messages in their order. Small ones are looked after at the end; for others a thread notices their end."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        # Two threads: the wait for one message must not hold up the posting of the next.
        self._poster, self._reaper = BackgroundWorker(interrupt=interrupt), BackgroundWorker(interrupt=interrupt)
        self._posting: Future[None] | None = None
        self._under_way: deque[Future[None]] = deque()
        self._small: list[tuple[Any, Callable[[], None]]] = []
        self._small_bytes = 0

    def send(self, post: Callable[[], Any], nbytes: int, done: Callable[[], None]) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()  # raises what a thread has met
        # A small one waits behind a large one that a thread still posts: messages arrive in the order of posting.
        if nbytes < _LARGE_BYTES and (self._posting is None or self._posting.done()):
            # Posted here, as a thread would have to be woken for each.
            self._small.append((post(), done))
            self._small_bytes += nbytes
            # Nobody has waited for them yet, so all of their buffers are held.
            if self._small_bytes > _MOST_SMALL_BYTES:
                self._reap(self._small)
                self._small, self._small_bytes = [], 0  # a list of its own: the thread empties the other one
            return
        # The work to wait for exists when the poster has come to it: the threads hand it on in this list.
        posted: list[tuple[Any, Callable[[], None]]] = []
        self._posting = self._poster.submit(lambda: posted.append((post(), done)))
        self._reap(posted, self._posting)

    def finish(self) -> None:
        for work, done in self._small:
            work.wait()
            done()
        self._small, self._small_bytes = [], 0
        while self._under_way:
            self._under_way.popleft().result()

    def _reap(self, posted: list[tuple[Any, Callable[[], None]]], after: Future[None] | None = None) -> None:
        def reap() -> None:
            if after is not None:
                after.result()  # where posting has failed nothing is on its way
            while posted:
                # One by one, so that each buffer is free as soon as its own message has left.
                work, done = posted.pop(0)
                work.wait()
                done()

        self._under_way.append(self._reaper.submit(reap))


def _unused_key(name: str, rank: int, size: int) -> str:
    """A name in the store that no transport of these ranks has had before: each rank counts its own."""
    if size == 1:
        return name
    store: Any = default_store()
    # With one counter for all, ranks would get different numbers; so they agree, as all make their transports together.
    return f"{name}/{store.add(f'zero_strategy/{name}/made/{rank}', 1)}"


def _host_groups(ranks: list[int], channels: Sequence[Channel], seconds: float, key: str) -> dict[Channel, Group]:
    """The groups that carry messages, by channel.

    They are made by their classes: `new_group` may give a group the name that a broken one of the same ranks had, and
    would find that one's addresses in the store.
    """
    if len(ranks) == 1:
        return {}
    local, timeout = ranks.index(dist.get_rank()), timedelta(seconds=seconds)
    down, up = (
        Group(dist.ProcessGroupGloo(_place(key, way), local, len(ranks), timeout), list(range(len(ranks))))
        for way in ("down", "up")
    )
    return {channel: down if channel.source < channel.target else up for channel in channels}


def _place(key: str, name: str) -> PrefixStore:
    store: Any = default_store()
    return PrefixStore(f"zero_strategy/{key}/{name}", store)
