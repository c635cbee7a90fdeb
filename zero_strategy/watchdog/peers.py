"""Liveness of other ranks: processes of this host, heartbeats of other hosts, and the thread that exchanges them.

The operating system is asked whether a process of this host runs, for one that is stopped or gone does not answer, and
one that computes in a single long call cannot.

The store is in one of the processes that train, as often as not: where that one is stopped, a call to it never returns.
Nothing is sent before there is something to tell, and no connection is made.

Every such rank's watch tells now and then that it is there: a number in the store that grows. A rank that waits for
another one listens. What a silence means cannot be known from here: a process or a host that is stopped, a network that
is cut, one long call that keeps the GIL. So it is reported as what it is, ends training only when it is long, and not
while another rank sees the process run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.diagnosis import Failure, FailureBoard, RankLabels, Report, listed, positions

Condition = Literal["running", "stopped", "gone", "unknown"]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATE, STARTED = 0, 19
"""Fields of /proc/PID/stat, counted behind the name, which may hold anything."""


class ProcessCard(NamedTuple):
    """Identity by which a process can be found.

    Attributes:
        host: Of this boot of its machine, and its PID namespace; empty where that cannot be said.
        pid: Its number there.
        started: When it was started, in the kernel's count: numbers are used again.
    """

    host: str
    pid: int
    started: int


def host() -> str:
    """This boot of this machine, and this PID namespace, without which a process number says nothing."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc shows the processes of another namespace
            return ""
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@cache
def _host_of(pid: int) -> str:
    return host()


def own_card() -> ProcessCard:
    """This process's."""
    try:
        fields = stat_fields(os.getpid())
    except OSError:
        fields = None
    return ProcessCard(host(), os.getpid(), int(fields[STARTED]) if fields else 0)


def condition(card: ProcessCard) -> Condition:
    """The condition of a process; `unknown` for those of other hosts. One that a debugger holds is running."""
    if not card.host or card.host != _host_of(os.getpid()):
        return "unknown"
    try:
        fields = stat_fields(card.pid)
    except OSError:  # such as too many open files: of this process
        return "unknown"
    # A zombie is one that has ended; only its parent has not asked yet.
    if fields is None or int(fields[STARTED]) != card.started or fields[STATE] in "ZXx":
        return "gone"
    return "stopped" if fields[STATE] == "T" else "running"


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


_PATIENCE = 2.0
"""Seconds that a call may take whose answer is waited for."""


class _Heard(NamedTuple):
    """The number that a rank has left: since when it is this one, and when it was last looked at."""

    number: int
    changed: float
    at: float


class StoreClient:
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
        self._worker = BackgroundWorker("zero-store-client")
        self._store: Any = None
        self._board: FailureBoard | None = None
        self._lost, self._late = False, list[Future[None]]()
        self._under_way: Future[None] | None = None
        self._reports: dict[int, tuple[Report, float]] = {}
        self._counts: dict[int, _Heard] = {}
        self._heartbeat: tuple[int, int] | None = None
        self._asked_at, self._lost_at = 0.0, 0.0

    def open(self) -> None:
        """Begin to connect: a connection that is there breaks at once with the store's process, a new one waits."""
        self._worker.submit(self._open)

    def exchange(self, own: Report | None, *, fetch: Collection[int] = (), listen: Collection[int] = ()) -> None:
        """Begin to leave a report, to look for a failure, to fetch reports of these, and to listen to those.

        Unless that goes on yet.
        """
        # One at a time, so that nothing piles up before a store that does not answer.
        if not self._reachable or (self._under_way is not None and not self._under_way.done()):
            return

        def exchange() -> None:
            try:
                self._exchange(own, fetch)
                self._listen(listen)
            except RuntimeError:  # the store is gone, with its process, or out of reach; torch logs each attempt
                self._lose(asked_at)
                raise

        asked_at = self._asked_at = time.monotonic()
        self._under_way = self._worker.submit(exchange)

    def heartbeat(self, rank: int, count: int) -> None:
        """Begin to leave a number that grows, with whatever is left next."""
        self._heartbeat = rank, count
        self.exchange(None)

    def silence(self, rank: int) -> float:
        """Seconds in which a rank's number was the same, as far as it was listened to."""
        heard = self._counts.get(rank)
        return 0.0 if heard is None else heard.at - heard.changed

    def unanswered(self) -> float:
        """Seconds since what was begun last, if that goes on yet, or has broken the connection."""
        # A broken connection tells as little as a silent one: nobody can be heard, or be told, any more.
        if self._lost:
            return time.monotonic() - self._lost_at
        waits = self._under_way is not None and not self._under_way.done()
        return time.monotonic() - self._asked_at if waits else 0.0

    def forget_silences(self) -> None:
        """Silences count from the next time on."""
        self._counts = {}

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

    def first(self, seconds: float, over: Callable[[], bool] = lambda: False) -> Failure | None:
        """The failure that was posted first, waiting so long for one.

        Args:
            seconds: Longest wait.
            over: Nothing is posted any more; asked before each look, of which there is one more then.
        """
        end, last = time.monotonic() + seconds, False
        while self.known is None and self._reachable and not last and time.monotonic() < end:
            last = over()
            self.exchange(None)
            time.sleep(0.05)
        return self.known

    def reports(self, age: float) -> tuple[list[Report], set[int]]:
        """The others' last reports; those ranks that have sent one in the last `age` seconds."""
        now, found = time.monotonic(), dict(self._reports)
        return [each for each, _ in found.values()], {rank for rank, (_, at) in found.items() if now - at < age}

    def _exchange(self, own: Report | None, fetch: Collection[int]) -> None:
        board = self._open()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            self._store.set(f"{self._key}/beat/{heartbeat[0]}", str(heartbeat[1]))
        if own is not None:
            self._store.set(f"{self._key}/at/{own.rank}", json.dumps(own.encode()))
        self.known = self.known or board.first()
        for rank in fetch:
            key = f"{self._key}/at/{rank}"
            # A report that was there once is there for good: only before the first one is a question needed, as `get`
            # waits.
            if rank in self._reports or self._store.check([key]):
                self._learn(Report.decode(json.loads(self._store.get(key))))

    def _listen(self, ranks: Collection[int]) -> None:
        known = self._counts  # those that are forgotten meanwhile stay so
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
            self._lose(time.monotonic())

    def _lose(self, since: float) -> None:
        if not self._lost:
            self._lost_at = since  # before the next line: another thread may look at both
            self._lost = True

    @property
    def _reachable(self) -> bool:
        """True if the store is there, as far as is known, and owes no answer that was waited for."""
        return not self._lost and all(answer.done() for answer in self._late)

    def close(self) -> None:
        """End the thread and the connection, as soon as they are at rest."""
        self._lose(time.monotonic())
        # The old thread ends by itself after what it is in, which may never return: nobody waits for it here.
        self._worker = BackgroundWorker("zero-store-client")
        self._store = self._board = None


_PER_BOUND = 6
"""Times that a rank tells that it is there in the time that it may be silent; a third of that is reported."""

_logger = logging.getLogger(__name__)


class Heartbeats:
    """Messages between this rank and ranks of other hosts.

    Args:
        rank: This one, in the world.
        far: Ranks whose processes cannot be looked at.
        store_client: The way to the store.
        seconds: That one of them may be silent while it is waited for; infinite: for ever, and nothing is told.
        shortest: Seconds between two times that this rank tells, at least.
    """

    def __init__(
        self, rank: int, far: Collection[int], store_client: StoreClient, *, seconds: float, shortest: float
    ) -> None:
        self._rank, self._far, self._store_client = rank, frozenset(far) - {rank}, store_client
        self._seconds = seconds if self._far else math.inf
        self.interval = max(shortest, self._seconds / _PER_BOUND)
        self._count, self._next = 0, 0.0
        self._reported: tuple[int, ...] = ()

    def tell(self, now: float) -> None:
        """Tell that this rank is there, if that is due."""
        if now >= self._next and self._seconds < math.inf:
            self._next = now + self.interval
            self._count += 1
            self._store_client.heartbeat(self._rank, self._count)

    def listen(self, ranks: Iterable[int]) -> list[int]:
        """Peers that are to be listened to."""
        return [rank for rank in ranks if rank in self._far] if self._seconds < math.inf else []

    def forget(self) -> None:
        """Silences count from now on: this rank has got on, or was stopped itself."""
        self._store_client.forget_silences()
        self._reported = ()

    def silent(
        self, awaited: Sequence[int], own: Report, others: Iterable[Report], rank_labels: RankLabels
    ) -> Failure | None:
        """The failure of ranks that have been silent for too long.

        Args:
            awaited: Ranks that are waited for.
            own: Where this rank is.
            others: Reports of others that hold now.
            rank_labels: Ranks in words.
        """
        if self._seconds == math.inf:
            return None
        if (seconds := self._store_client.unanswered()) >= self._seconds:
            text = f"the store through which ranks hear of each other has not answered for {seconds:.0f} s: {_MEANS}"
            return Failure("silent", awaited[0], f"{text}; {positions([own], rank_labels)}", {})
        # A rank is vouched for by another one of its host that sees its process run.
        seen = {rank for report in others for rank in report.sees}
        silences = {rank: self._store_client.silence(rank) for rank in self.listen(awaited) if rank not in seen}
        limit = max(2 * self.interval, self._seconds / 3)
        silences = {rank: seconds for rank, seconds in silences.items() if seconds >= limit}
        if not silences:
            self._reported = ()
            return None
        ranks, seconds = tuple(silences), max(silences.values())
        text = f"{listed(ranks, rank_labels)} {'has' if len(ranks) == 1 else 'have'} not been heard for {seconds:.0f} s"
        text = f"{text}: {_MEANS}; {positions([own], rank_labels)}"
        if seconds >= self._seconds:
            return Failure("silent", max(silences, key=lambda rank: silences[rank]), text, {})
        if ranks != self._reported:
            self._reported = ranks
            _logger.warning("%s; given up after %g s (watchdog.unheard_seconds)", text, self._seconds)
        return None


_MEANS = "a process or a host is stopped, the network between is broken, or one long call keeps all threads waiting"
