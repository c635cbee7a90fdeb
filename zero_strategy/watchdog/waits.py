"""Waits for other ranks that end when one of them has failed, or after a timeout.

A thread looks at what the main thread waits for. While it waits long, the thread asks the board for failures; when
there is one, or the time is over, it breaks this rank's connections, and with them the wait. The peers' waits for this
rank break at once, too; and they look at the board.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
_BREAKING_TAG = 1 << 20


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

    def abort(self) -> None:
        """Break this rank's connections."""
        if self.on_device:
            self._backend.abort()
            return
        # Gloo's own way to end transfers from one rank to another is that a wait runs out of time. A connection that is
        # broken already refuses at once, and says nothing to the others.
        gloo: Any = self._backend
        for peer in range(gloo.size()):
            if peer != gloo.rank():
                with contextlib.suppress(RuntimeError):
                    buffer = torch.empty(1, dtype=torch.uint8)
                    gloo.recv([buffer], peer, _BREAKING_TAG).wait(timedelta(milliseconds=1))


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
        self._expired = ""
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

    def watching(self, awaited: Awaited) -> _Watching:
        """Inside, something is waited for; an error of the transport is explained."""
        return _Watching(self, awaited)

    def _begin_wait(self, awaited: Awaited) -> None:
        if not self._begun:
            self._begun = True
            self._watch.start(self)
        self._waiting = (awaited, time.monotonic())
        if self._watchdog is not None:
            self._watchdog.waiting[threading.get_ident()] = awaited
        if self._resting:
            self._wake()

    def _end_wait(self, awaited: Awaited, error: BaseException | None) -> None:
        try:
            if isinstance(error, RuntimeError):
                raise self._explained(error, awaited) from error
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

    def fail(self, failure: Failure) -> Failure:
        """Post this rank's failure and break its connections, so that all ranks stop.

        Returns:
            The failure that came first, which may be another one.
        """
        first = self.board.post(failure)
        self.break_connections()
        return first

    def break_connections(self) -> None:
        """End this rank's transfers, and the peers' with this rank."""
        with self._lock:
            if self.broken:
                return
            self.broken = True
            for reference in self._groups:
                if (group := reference()) is not None:
                    with contextlib.suppress(Exception):
                        group.abort()

    def _explained(self, error: RuntimeError, awaited: Awaited) -> RankFailedError:
        if self._watchdog is not None and self._watchdog.failure is not None:
            self._watchdog.told()
            return RankFailedError(self._watchdog.failure)
        failure = self.board.first(0.0 if self._expired else _REASON_SECONDS)
        if failure is None and self._expired:
            failure = self.fail(Failure("silent", awaited.rank, self._expired, {}))
        elif failure is None:
            text = f"{awaited.peer} is gone: its connection broke while {self.name} waited for {awaited.what} ({error})"
            failure = self.fail(Failure("gone", awaited.rank, text, {}))
        self.break_connections()
        return RankFailedError(failure)

    def look(self) -> float:
        """See `Looker`."""
        if self._told != self._batch:
            self._told = self._batch
            self.board.come_to(self.rank, self._told)
        if (waiting := self._waiting) is not None and not self.broken:
            self._look_at(waiting[0], time.monotonic() - waiting[1])
        return math.inf if self._resting else _LOOK_SECONDS

    def _look_at(self, awaited: Awaited, seconds: float) -> None:
        """Breaks the connections if there is no point in waiting on."""
        if seconds > _ASK_AFTER and self.board.first() is not None:
            self.break_connections()
        elif seconds > self.timeout:
            self._expire(
                f"{self.name} has waited {self.timeout:g} s for {awaited.what}, and {awaited.peer} has neither sent it "
                "nor failed: it is out of step, or hangs"
            )
        elif seconds > self.patience and self.board.batch_of(awaited.rank) in range(self._batch):
            self._expire(
                f"{awaited.peer} has not come to batch {self._batch} of the pipeline while {self.name} waited "
                f"{self.patience:g} s for {awaited.what}: it is out of step, or busy with something else"
            )

    def _expire(self, text: str) -> None:
        self._expired = text
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
