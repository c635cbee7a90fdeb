"""Carries what ranks tell each other about failures, in a thread of its own.

The store is in one of the processes that train, as often as not: where that one is stopped, a call to it never returns.
Nothing is sent before there is something to tell, and no connection is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple

from zero_strategy.distributed.background import BackgroundWorker
from zero_strategy.distributed.desync import Report
from zero_strategy.distributed.failure_board import Failure, FailureBoard

_PATIENCE = 2.0
"""Seconds that a call may take whose answer is waited for."""


class _Heard(NamedTuple):
    """The number that a rank has left: since when it is this one, and when it was last looked at."""

    number: int
    changed: float
    at: float


class Courier:
    """This rank's way to a failure board and to the others' reports.

    Args:
        connect: Makes the connection to the store, when it is first needed.
        key: Keeps boards apart; equal on all ranks.

    Attributes:
        known: The failure that all ranks know of.
    """

    def __init__(self, connect: Callable[[], Any], key: str) -> None:
        self.known: Failure | None = None
        self._connect, self._key = connect, f"zero_strategy/guard/{key}"
        self._worker = BackgroundWorker("zero-courier")
        self._store: Any = None
        self._board: FailureBoard | None = None
        self._lost, self._late = False, list[Future[None]]()
        self._under_way: Future[None] | None = None
        self._reports: dict[int, tuple[Report, float]] = {}
        self._beats: dict[int, _Heard] = {}
        self._own_beat: tuple[int, int] | None = None
        self._asked_at = 0.0

    def exchange(self, own: Report | None, *, fetch: Collection[int] = (), listen: Collection[int] = ()) -> None:
        """Begin to leave a report, to look for a failure, to fetch reports of these, and to listen to those.

        Unless that goes on yet.
        """
        if not self._reachable or (self._under_way is not None and not self._under_way.done()):
            return

        def exchange() -> None:
            try:
                self._exchange(own, fetch)
                self._listen(listen)
            except RuntimeError:  # the store is gone, with its process; torch logs each attempt
                self._lost = True
                raise

        self._asked_at = time.monotonic()
        self._under_way = self._worker.submit(exchange)

    def beat(self, rank: int, count: int) -> None:
        """Begin to leave a number that grows, with whatever is left next."""
        self._own_beat = rank, count
        self.exchange(None)

    def silence(self, rank: int) -> float:
        """Seconds in which a rank's number was the same, as far as it was listened to."""
        heard = self._beats.get(rank)
        return 0.0 if heard is None else heard.at - heard.changed

    def unanswered(self) -> float:
        """Seconds since what was begun last, if that goes on yet."""
        waits = not self._lost and self._under_way is not None and not self._under_way.done()
        return time.monotonic() - self._asked_at if waits else 0.0

    def forget_beats(self) -> None:
        """Silences count from the next time on."""
        self._beats = {}

    def tell(self, own: Report) -> None:
        """Leave a report, and return when that is done, or takes too long."""
        if self._reachable:
            self._answered(self._worker.submit(lambda: self._exchange(own, ())))

    def post(self, failure: Failure) -> Failure:
        """Post a failure; returns the one that was first, as far as that can be found out."""

        def post() -> None:
            self.known = self._open().post(failure)

        if self.known is None and self._reachable:
            self._answered(self._worker.submit(post))
        return failure if self.known is None else self.known

    def first(self, seconds: float) -> Failure | None:
        """The failure that was posted first, waiting so long for one."""
        end = time.monotonic() + seconds
        while self.known is None and self._reachable and time.monotonic() < end:
            self.exchange(None)
            time.sleep(0.05)
        return self.known

    def reports(self, age: float) -> tuple[list[Report], set[int]]:
        """The others' last reports; those ranks that have sent one in the last `age` seconds."""
        now, found = time.monotonic(), dict(self._reports)
        return [each for each, _ in found.values()], {rank for rank, (_, at) in found.items() if now - at < age}

    def _exchange(self, own: Report | None, fetch: Collection[int]) -> None:
        board = self._open()
        beat, self._own_beat = self._own_beat, None
        if beat is not None:
            self._store.set(f"{self._key}/beat/{beat[0]}", str(beat[1]))
        if own is not None:
            self._store.set(f"{self._key}/at/{own.rank}", json.dumps(own.encode()))
        self.known = self.known or board.first()
        for rank in fetch:
            key = f"{self._key}/at/{rank}"
            if rank in self._reports or self._store.check([key]):
                self._learn(Report.decode(json.loads(self._store.get(key))))

    def _listen(self, ranks: Collection[int]) -> None:
        known = self._beats  # those that are forgotten meanwhile stay so
        for rank in ranks:
            key = f"{self._key}/beat/{rank}"
            count, now = int(self._store.get(key)) if self._store.check([key]) else 0, time.monotonic()
            before = known.get(rank)
            known[rank] = _Heard(count, now if before is None or before.number != count else before.changed, now)

    def _learn(self, report: Report) -> None:
        before = self._reports.get(report.rank)
        if before is None:  # it may have been there for long
            self._reports[report.rank] = report, 0.0
        elif before[0].beat != report.beat:
            self._reports[report.rank] = report, time.monotonic()

    def _open(self) -> FailureBoard:
        if self._board is None:
            self._store = self._connect()
            self._board = FailureBoard(self._store, self._key)
        return self._board

    def _answered(self, answer: Future[None]) -> None:
        try:
            answer.result(_PATIENCE)
        except TimeoutError:
            self._late.append(answer)
        except Exception:  # the store is gone
            self._lost = True

    @property
    def _reachable(self) -> bool:
        """Whether the store is there, as far as is known, and owes no answer that was waited for."""
        return not self._lost and all(answer.done() for answer in self._late)

    def close(self) -> None:
        """End the thread and the connection, as soon as they are at rest."""
        self._lost = True
        self._worker = BackgroundWorker("zero-courier")
        self._store = self._board = None
