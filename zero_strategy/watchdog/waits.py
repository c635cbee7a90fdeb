"""Waits for other ranks that end when one of them has failed, or after a timeout.

A thread looks at what the main thread waits for. While it waits long, the thread asks the board for failures; when
there is one, or the time is over, it breaks this rank's connections, and with them the wait. The peers' waits for this
rank break at once, too; and they look at the board.

A device waits for other ranks as well, and whoever then waits for the device waits for them: in `.item()` of a loss,
for one, where nobody could be told. So the thread also looks at what devices have under way (`follow`), whatever the
host does meanwhile. No connection of the host breaks where a device waits for a rank that is gone; the thread asks
the connection that the host has to that rank.

Once connections are broken, nothing counts as having come: an end that a device tells of then may be that of the
break, and its bytes anybody's.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.runtime.worker import Watch
from zero_strategy.watchdog.diagnosis import DesyncError, Failure, FailureBoard, Wait

if TYPE_CHECKING:
    from zero_strategy.watchdog.watchdog import Watchdog


_LOOK_SECONDS = 0.1
_ASK_AFTER = 0.3
"""Seconds of a wait before the store is asked: most waits are shorter."""
_REASON_SECONDS = 1.0
"""How long a broken connection waits for its reason, which is posted before."""
_POLL_SECONDS = 0.0002
"""Between two looks of who waits for what holds nobody: a fiftieth of the shortest computation of a stage."""
_ASK_PEER_SECONDS = 1.0
"""Between two questions whether a rank that a device waits for is there: each leaves a byte that nobody receives."""
_BREAKING_TAG = 1 << 20
_ASKING_TAG = _BREAKING_TAG + 1


class RankFailedError(DesyncError):
    """Another rank has failed, is gone or does not come; `failure` tells."""

    failure: Failure

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text, failure)


class Group:
    """Connected ranks.

    Args:
        backend: What torch has for them: gloo's or NCCL's process group.
        ranks: Their numbers, in the order of the backend's.
    """

    def __init__(self, backend: Any, ranks: list[int]) -> None:
        self._backend, self._ranks = backend, ranks

    @property
    def on_device(self) -> bool:
        """A wait for a transfer makes the current stream wait, not the caller, who can ask whether it is over."""
        return not isinstance(self._backend, dist.ProcessGroupGloo)

    def send(self, buffer: Tensor, to: int, tag: int) -> Any:
        """Begin to send; returns what can be waited for."""
        return self._backend.send([buffer], self._ranks.index(to), tag)

    def receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        """Begin to receive; returns what can be waited for."""
        return self._backend.recv([buffer], self._ranks.index(source), tag)

    def ask(self, peer: int) -> None:
        """Raise if the connection to a rank has ended, as it does with the rank's process. Of the host only."""
        # The byte is never received. Gloo sends no byte without a receive, only a notice of a few bytes.
        self._backend.send([torch.zeros(1, dtype=torch.uint8)], self._ranks.index(peer), _ASKING_TAG)

    def abort(self) -> None:
        """Break this rank's connections."""
        if self.on_device:
            self._backend.abort()
            return
        # Gloo's own way to end transfers is that a wait runs out of time, which closes all connections of the group. A
        # connection that is broken already refuses at once, and says nothing to the others.
        gloo: Any = self._backend
        for peer in _to_break(gloo.rank(), gloo.size()):
            try:
                gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAKING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if _OUT_OF_TIME in str(error):
                    return


_OUT_OF_TIME = "Timed out waiting"
"""Part of gloo's message when a wait runs out of time."""
_ALL_CONNECTED = 8
"""Ranks of a group of gloo in which each has a connection to each; see `comm.process_group`."""


def _to_break(rank: int, size: int) -> list[int]:
    """Ranks of a group by which its connections may be broken.

    Among many, those of small messages, with which it is connected from the beginning. To ask another one would make a
    connection, which the other has to make, too.
    """
    if size <= _ALL_CONNECTED:
        return [peer for peer in range(size) if peer != rank]
    steps = [1 << place for place in range((size - 1).bit_length())]
    found = dict.fromkeys((rank + sign * step) % size for step in steps for sign in (1, -1))
    return [peer for peer in found if peer != rank]


@dataclass(frozen=True)
class Awaited:
    """Operation that is waited for.

    Attributes:
        what: In words: "the activation of micro-batch 3".
        peer: Who it comes from, or goes to, in words: "stage 1 (rank 1)".
        rank: Whose it is, in the world.
    """

    what: str
    peer: str
    rank: int

    def wait(self) -> Wait:
        """For a watchdog's reports."""
        return Wait(f"a wait for {self.what} from {self.peer}", (self.rank,), message=True)


class _UnderWay(NamedTuple):
    """A transfer that a device has under way.

    Attributes:
        over: Whether it is over; asked by any thread.
        awaited: As the device waits for it.
        ask: Raises a RuntimeError if the other rank is gone; None: nobody can be asked.
    """

    over: Callable[[], bool]
    awaited: Awaited
    ask: Callable[[], object] | None


class BoundedWaits:
    """The waits of one rank for its peers.

    Args:
        rank: This rank, in the world.
        name: This rank in words: "stage 0 (rank 0)".
        groups: Whose connections are broken on failure; held weakly.
        board: Where failures are posted.
        timeout: Seconds that a wait may take.
        patience: Seconds of a wait in which the other rank must come to this rank's batch.
        watchdog: Knows of failures among other ranks; these connections break with its own.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        groups: list[Group],
        board: FailureBoard,
        timeout: float,
        patience: float,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.rank, self.name, self.board = rank, name, board
        self._groups = [weakref.ref(group) for group in groups]  # the thread that looks keeps no connections alive
        self.timeout, self.patience = timeout, min(patience, timeout)
        self.broken = False
        self._batch = self._told = 0
        self._waiting: tuple[Awaited, float] | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._oldest: _UnderWay | None = None
        self._oldest_since = self._asked = 0.0
        self._expired: Failure | None = None
        """Why this rank gave a wait up, not yet posted: the board may take long."""
        self._resting, self._begun = True, False
        self._lock = threading.Lock()
        self._watchdog = watchdog
        self._watch = Watch()  # of its own, as a call to the board may take for ever
        if watchdog is not None:
            watchdog.add_break(self.break_connections)

    def begin(self, batch: int) -> None:
        """This rank has come to a batch, numbered from 1; all ranks do the same."""
        self._batch = batch
        self._wake()

    def wait(self, work: Any, awaited: Awaited) -> None:
        """Wait for something under way.

        Raises:
            RankFailedError: If it cannot come any more, or has not come in time.
        """
        with self.watching(awaited):
            work.wait()

    def wait_until(self, over: Callable[[], bool], awaited: Awaited) -> None:
        """Wait for what holds nobody and says whether it is over: an event of a device, a job of a thread.

        Raises:
            RankFailedError: As `wait`.
        """
        with self.watching(awaited):
            while not self.broken and not over():
                time.sleep(_POLL_SECONDS)

    def follow(self, over: Callable[[], bool], awaited: Awaited, ask: Callable[[], object] | None = None) -> None:
        """A device waits for another rank from now on, in the order of these calls, while the host goes on.

        Args:
            over: Whether it has ended; asked by any thread. It holds no tensors.
            awaited: What the device waits for.
            ask: Raises a RuntimeError if that rank is gone, without waiting for it.
        """
        # What is over goes as new ones come, from the front, where the oldest are: none piles up in a long batch.
        while self._under_way and self._under_way[0].over():
            self._under_way.popleft()
        self._under_way.append(_UnderWay(over, awaited, ask))
        self._start()

    def settle(self) -> None:
        """Wait until devices have ended all that is followed.

        Raises:
            RankFailedError: As `wait`.
        """
        while self._under_way:
            self.wait_until(self._under_way[0].over, self._under_way[0].awaited)
            self._under_way.popleft()

    def watching(self, awaited: Awaited) -> _Watching:
        """Inside, something is waited for; an error of the transport is explained."""
        return _Watching(self, awaited)

    def _start(self) -> None:
        if not self._begun:
            self._begun = True
            self._watch.start(self)
        if self._resting:
            self._wake()

    def _begin_wait(self, awaited: Awaited) -> None:
        self._waiting = (awaited, time.monotonic())
        if self._watchdog is not None:
            self._watchdog.waiting[threading.get_ident()] = awaited
        self._start()

    def _end_wait(self, awaited: Awaited, error: BaseException | None) -> None:
        try:
            if isinstance(error, RuntimeError):
                raise self._explained(error, awaited) from error
            # Also where the wait ended well: what has come may be the end of the broken connection, not its bytes.
            if self.broken and (error is None or isinstance(error, Exception)):
                raise self._explained(RuntimeError("the connections are broken"), awaited) from error
        finally:
            self._waiting = None
            if self._watchdog is not None:
                self._watchdog.progress()
                self._watchdog.waiting.pop(threading.get_ident(), None)

    def rest(self) -> None:
        """Nothing is waited for until the next wait: the thread sleeps."""
        self._resting = True

    def _wake(self) -> None:
        self._resting = False
        self._watch.poke()

    def stop(self) -> None:
        """Ends the thread."""
        self._watch.stop()
        self._under_way.clear()
        self._tell_watchdog(None)

    def fail(self, failure: Failure) -> Failure:
        """Post this rank's failure and break its connections, so that all ranks stop.

        Returns:
            The failure that came first, which may be another one.
        """
        # Before the connections break, by which the peers learn that there is something to read.
        first = self.board.post(failure)
        self.break_connections()
        return first

    def break_connections(self) -> None:
        """End this rank's transfers, and the peers' with this rank."""
        with self._lock:
            if self.broken:
                return
            # First, so that waits which the next lines end do not count as successful.
            self.broken = True
            for reference in self._groups:
                if (group := reference()) is not None:
                    with contextlib.suppress(Exception):
                        group.abort()

    def _explained(self, error: RuntimeError, awaited: Awaited) -> RankFailedError:
        if self._watchdog is not None and self._watchdog.failure is not None:
            self._watchdog.told()
            return RankFailedError(self._watchdog.failure)
        # This rank has broken them itself, and knows why. Else a rank that failed has posted its reason first.
        failure = self.board.first(0.0 if self._expired is not None else _REASON_SECONDS)
        if failure is None:
            failure = self.fail(self._expired or self._gone(error, awaited))
        self.break_connections()
        return RankFailedError(failure)

    def _gone(self, error: RuntimeError, awaited: Awaited) -> Failure:
        text = f"{awaited.peer} is gone: its connection broke while {self.name} waited for {awaited.what} ({error})"
        return Failure("gone", awaited.rank, text, {})

    def look(self) -> float:
        """See `Looker`."""
        # The watch's thread tells it: a call to the store may take long, and training does not wait for that.
        if self._told != self._batch:
            self._told = self._batch
            self.board.come_to(self.rank, self._told)
        if (waiting := self._waiting) is not None and not self.broken:
            self._look_at(waiting[0], time.monotonic() - waiting[1])
        if not self.broken:
            self._look_at_device(time.monotonic())
        return math.inf if self._resting else _LOOK_SECONDS

    def _look_at_device(self, now: float) -> None:
        """See after what a device has waited for longest; the time begins anew with each."""
        oldest = self._oldest_under_way()
        if oldest is not self._oldest:
            self._oldest, self._oldest_since = oldest, now
            self._tell_watchdog(None)
        if oldest is None or (seconds := now - self._oldest_since) <= _ASK_AFTER:
            return
        self._tell_watchdog(oldest.awaited)
        self._look_at(oldest.awaited, seconds)
        if oldest.ask is None or self.broken or now - self._asked < _ASK_PEER_SECONDS:
            return
        self._asked = now
        try:
            oldest.ask()
        except RuntimeError as error:
            if self.board.first(_REASON_SECONDS) is None:
                self._expired = self._gone(error, oldest.awaited)
            self.break_connections()

    def _oldest_under_way(self) -> _UnderWay | None:
        for number in itertools.count():  # the main thread takes away what is over meanwhile
            try:
                found = self._under_way[number]
            except IndexError:
                return None
            if not found.over():
                return found
        return None

    def _tell_watchdog(self, awaited: Awaited | None) -> None:
        """Tell it what the device waits for: the host may wait for the device, somewhere in the user's code."""
        if self._watchdog is None:
            return
        if awaited is not None:
            self._watchdog.waiting[-id(self)] = awaited  # no thread has such a number
        elif self._watchdog.waiting.pop(-id(self), None) is not None:
            self._watchdog.progress()

    def _look_at(self, awaited: Awaited, seconds: float) -> None:
        """Breaks the connections if there is no point in waiting on."""
        if seconds > _ASK_AFTER and self.board.first() is not None:
            self.break_connections()
        elif seconds > self.timeout:
            self._expire(
                awaited,
                f"{self.name} has waited {self.timeout:g} s for {awaited.what}, and {awaited.peer} has neither sent it "
                "nor failed: it is out of step, or hangs",
            )
        # None, from a store that does not answer, is in no range: that is no evidence.
        elif seconds > self.patience and self.board.batch_of(awaited.rank) in range(self._batch):
            self._expire(
                awaited,
                f"{awaited.peer} has not come to batch {self._batch} of the pipeline while {self.name} waited "
                f"{self.patience:g} s for {awaited.what}: it is out of step, or busy with something else",
            )

    def _expire(self, awaited: Awaited, text: str) -> None:
        self._expired = Failure("silent", awaited.rank, text, {})
        self.break_connections()


class _Watching:
    """One wait. A class, since there are several for each message, and a generator takes several times as long."""

    __slots__ = ("_awaited", "_waits")

    def __init__(self, waits: BoundedWaits, awaited: Awaited) -> None:
        self._waits, self._awaited = waits, awaited

    def __enter__(self) -> None:
        self._waits._begin_wait(self._awaited)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waits._end_wait(self._awaited, error)
