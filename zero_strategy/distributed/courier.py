"""Carries what ranks tell each other about failures, in a thread of its own.

The store is in one of the processes that train, as often as not: where that one is stopped, a call to it never returns.
Nothing is sent before there is something to tell, and no connection is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from zero_strategy.distributed.background import BackgroundWorker
from zero_strategy.distributed.desync import Report
from zero_strategy.distributed.failure_board import Failure, FailureBoard

_PATIENCE = 2.0
"""Seconds that a call may take whose answer is waited for."""


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
        self._lost = False
        self._under_way: Future[None] | None = None
        self._reports: dict[int, tuple[Report, float]] = {}

    def exchange(self, own: Report | None, *, fetch: Collection[int] = ()) -> None:
        """Begin to leave a report, to look for a failure, and to fetch reports of these; unless that goes on yet."""
        if self._lost or (self._under_way is not None and not self._under_way.done()):
            return

        def exchange() -> None:
            try:
                self._exchange(own, fetch)
            except RuntimeError:  # the store is gone, with its process; torch logs each attempt
                self._lost = True
                raise

        self._under_way = self._worker.submit(exchange)

    def tell(self, own: Report) -> None:
        """Leave a report, and return when that is done, or takes too long."""
        if not self._lost:
            self._answered(self._worker.submit(lambda: self._exchange(own, ())))

    def post(self, failure: Failure) -> Failure:
        """Post a failure; returns the one that was first, as far as that can be found out."""

        def post() -> None:
            self.known = self._open().post(failure)

        if self.known is None and not self._lost:
            self._answered(self._worker.submit(post))
        return failure if self.known is None else self.known

    def first(self, seconds: float) -> Failure | None:
        """The failure that was posted first, waiting so long for one."""
        end = time.monotonic() + seconds
        while self.known is None and not self._lost and time.monotonic() < end:
            self.exchange(None)
            time.sleep(0.05)
        return self.known

    def reports(self, age: float) -> tuple[list[Report], set[int]]:
        """The others' last reports; those ranks that have sent one in the last `age` seconds."""
        now, found = time.monotonic(), dict(self._reports)
        return [each for each, _ in found.values()], {rank for rank, (_, at) in found.items() if now - at < age}

    def _exchange(self, own: Report | None, fetch: Collection[int]) -> None:
        board = self._open()
        if own is not None:
            self._store.set(f"{self._key}/at/{own.rank}", json.dumps(own.encode()))
        self.known = self.known or board.first()
        for rank in fetch:
            key = f"{self._key}/at/{rank}"
            if rank in self._reports or self._store.check([key]):
                self._learn(Report.decode(json.loads(self._store.get(key))))

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
        except Exception:  # too late, or the store is gone
            self._lost = True

    def close(self) -> None:
        """End the thread and the connection, as soon as they are at rest."""
        self._lost = True
        self._worker = BackgroundWorker("zero-courier")
        self._store = self._board = None
