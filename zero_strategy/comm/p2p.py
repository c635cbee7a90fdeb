"""Point-to-point messages, under way while the ranks compute.

Messages to higher ranks and to lower ones have a process group each: on gloo a connection carries one direction, so
that none waits until another one has gone by. Channels on one connection are told apart by tags. NCCL knows no tags and
keeps one order per communicator, so there every channel has a group of its own.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.comm.store import own_store
from zero_strategy.runtime.torch_private import PrefixStore, default_store
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.diagnosis import FailureBoard
from zero_strategy.watchdog.waits import Awaited, BoundedWaits, Group
from zero_strategy.watchdog.watchdog import Watchdog

_LARGE_BYTES = 1 << 20
"""Of a message that a thread posts: posting copies to the socket as much as it takes."""
_MOST_SMALL_BYTES = 32 << 20
"""Of small messages, until a thread lets go of those that have arrived."""
_LOOK_SECONDS = 0.0002
_BACKUP_SECONDS = 60.0
"""By which gloo's own time-out is longer than ours."""


class Channel(NamedTuple):
    """A way from one rank to another one, with an order of its own.

    Attributes:
        source: Rank that sends, among the transport's ranks.
        target: Rank that receives.
        tag: Tells channels between the same two ranks apart; small.
    """

    source: int
    target: int
    tag: int


class PointToPoint:
    """The transport between some ranks. Made, and made again after a failure, by all of them together.

    Args:
        ranks: World ranks that take part, in the order of their numbers here.
        channels: All that will be used, by any of them.
        device: Of the messages.
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
        self._groups = _make_groups(self.ranks, channels, device, timeout + _BACKUP_SECONDS, key)
        board = FailureBoard(own_store(len(self.ranks)), key)
        groups = list(dict.fromkeys(self._groups.values()))
        self.waits = BoundedWaits(self.ranks[self.rank], title, groups, board, timeout, patience, watchdog)
        end = self.waits.break_connections
        self._senders = {group: _DeviceSender() if group.on_device else _Sender(end) for group in groups}
        weakref.finalize(self, self.waits.stop)

    def post(self, buffer: Tensor, channel: Channel) -> Any:
        """Receive into a buffer what is sent next on a channel.

        Args:
            buffer: uint8; exactly as long as the message.

        Returns:
            To be given to `wait`.
        """
        with self.waits.watching(self._awaited("a message", channel.source)):
            return self._groups[channel].receive(buffer, channel.source, channel.tag)

    def send(self, buffer: Tensor, channel: Channel, kind: str, done: Callable[[], None]) -> None:
        """Send a buffer.

        Args:
            buffer: uint8; unchanged until `done` is called.
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

    def finish_sends(self) -> None:
        """Wait until everything is sent."""
        for sender in self._senders.values():
            with self.waits.watching(Awaited("its messages to arrive", "a neighbour", self.ranks[self.rank])):
                sender.finish()

    def close(self) -> None:
        """End all connections."""
        self.waits.stop()
        self.waits.break_connections()

    def _awaited(self, what: str, rank: int) -> Awaited:
        return Awaited(what, f"rank {self.ranks[rank]}", self.ranks[rank])


class _Sender:
    """Posts messages in their order. Small ones are looked after at the end; for others a thread notices their end."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._poster, self._reaper = BackgroundWorker(interrupt=interrupt), BackgroundWorker(interrupt=interrupt)
        self._posting: Future[None] | None = None
        self._under_way: deque[Future[None]] = deque()
        self._small: list[tuple[Any, Callable[[], None]]] = []
        self._small_bytes = 0

    def send(self, post: Callable[[], Any], nbytes: int, done: Callable[[], None]) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        if nbytes < _LARGE_BYTES and (self._posting is None or self._posting.done()):
            self._small.append((post(), done))
            self._small_bytes += nbytes
            if self._small_bytes > _MOST_SMALL_BYTES:
                self._reap(self._small)
                self._small, self._small_bytes = [], 0
            return
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
                after.result()
            while posted:
                work, done = posted.pop(0)
                work.wait()
                done()

        self._under_way.append(self._reaper.submit(reap))


class _DeviceSender(_Sender):
    """Posting takes no time, and a wait would hold the stream: messages are looked after now and then instead."""

    def __init__(self) -> None:
        self._posted: deque[tuple[Any, Callable[[], None]]] = deque()

    def send(self, post: Callable[[], Any], nbytes: int, done: Callable[[], None]) -> None:
        self._posted.append((post(), done))
        self._look()

    def finish(self) -> None:
        while self._posted:
            self._look()
            time.sleep(_LOOK_SECONDS if self._posted else 0)

    def _look(self) -> None:
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()[1]()


def _unused_key(name: str, rank: int, size: int) -> str:
    """A name in the store that no transport of these ranks has had before: each rank counts its own."""
    if size == 1:
        return name
    store: Any = default_store()
    return f"{name}/{store.add(f'zero_strategy/{name}/made/{rank}', 1)}"


def _make_groups(
    ranks: list[int], channels: Sequence[Channel], device: torch.device, seconds: float, key: str
) -> dict[Channel, Group]:
    """By channel, what carries it; only channels of this rank.

    They are made by their classes: `new_group` may give a group the name that a broken one of the same ranks had, and
    would find that one's addresses in the store.
    """
    if len(ranks) == 1:
        return {}
    local, timeout = ranks.index(dist.get_rank()), timedelta(seconds=seconds)
    store: Any = default_store()

    def place(name: str) -> PrefixStore:
        return PrefixStore(f"zero_strategy/{key}/{name}", store)

    if device.type == "cpu":
        down, up = (
            Group(dist.ProcessGroupGloo(place(way), local, len(ranks), timeout), list(range(len(ranks))))
            for way in ("down", "up")
        )
        return {channel: down if channel.source < channel.target else up for channel in channels}
    found = {}
    for channel in channels:
        pair = sorted(channel[:2])
        if local in pair:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(place("-".join(map(str, channel))), pair.index(local), 2, options)
            found[channel] = Group(backend, pair)
    return found
