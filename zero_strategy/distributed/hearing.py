"""Whether ranks are heard of whose processes cannot be looked at, since they are on other hosts.

Every such rank's watch tells now and then that it is there: a number in the store that grows. A rank that waits for
another one listens. What a silence means cannot be known from here: a process or a host that is stopped, a network that
is cut, one long call that keeps the GIL. So it is reported as what it is, ends training only when it is long, and not
while another rank sees the process run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence

from zero_strategy.distributed.courier import Courier
from zero_strategy.distributed.desync import Report, Titles, listed, positions
from zero_strategy.distributed.failure_board import Failure

_PER_BOUND = 6
"""Times that a rank tells that it is there in the time that it may be silent; a third of that is reported."""

_logger = logging.getLogger(__name__)


class Hearing:
    """What this rank tells ranks of other hosts, and hears of them.

    Args:
        rank: This one, in the world.
        far: Ranks whose processes cannot be looked at.
        courier: The way to the store.
        seconds: That one of them may be silent while it is waited for; infinite: for ever, and nothing is told.
        shortest: Seconds between two times that this rank tells, at least.
    """

    def __init__(
        self, rank: int, far: Collection[int], courier: Courier, *, seconds: float, shortest: float
    ) -> None:
        self._rank, self._far, self._courier = rank, frozenset(far) - {rank}, courier
        self._seconds = seconds if self._far else math.inf
        self.interval = max(shortest, self._seconds / _PER_BOUND)
        self._count, self._next = 0, 0.0
        self._reported: tuple[int, ...] = ()

    def tell(self, now: float) -> None:
        """Tell that this rank is there, if that is due."""
        if now >= self._next and self._seconds < math.inf:
            self._next = now + self.interval
            self._count += 1
            self._courier.beat(self._rank, self._count)

    def listen(self, ranks: Iterable[int]) -> list[int]:
        """Those of them that are to be listened to."""
        return [rank for rank in ranks if rank in self._far] if self._seconds < math.inf else []

    def forget(self) -> None:
        """Silences count from now on: this rank has got on, or was stopped itself."""
        self._courier.forget_beats()
        self._reported = ()

    def silent(self, awaited: Sequence[int], own: Report, others: Iterable[Report], titles: Titles) -> Failure | None:
        """The failure of ranks that have been silent for too long.

        Args:
            awaited: Ranks that are waited for.
            own: Where this rank is.
            others: Reports of others that hold now.
            titles: Ranks in words.
        """
        if self._seconds == math.inf:
            return None
        if (seconds := self._courier.unanswered()) >= self._seconds:
            text = f"the store through which ranks hear of each other has not answered for {seconds:.0f} s: {_MEANS}"
            return Failure("silent", awaited[0], f"{text}; {positions([own], titles)}", {})
        seen = {rank for report in others for rank in report.sees}
        silences = {rank: self._courier.silence(rank) for rank in self.listen(awaited) if rank not in seen}
        limit = max(2 * self.interval, self._seconds / 3)
        silences = {rank: seconds for rank, seconds in silences.items() if seconds >= limit}
        if not silences:
            self._reported = ()
            return None
        ranks, seconds = tuple(silences), max(silences.values())
        text = f"{listed(ranks, titles)} {'has' if len(ranks) == 1 else 'have'} not been heard for {seconds:.0f} s"
        text = f"{text}: {_MEANS}; {positions([own], titles)}"
        if seconds >= self._seconds:
            return Failure("silent", max(silences, key=lambda rank: silences[rank]), text, {})
        if ranks != self._reported:
            self._reported = ranks
            _logger.warning("%s; given up after %g s (guard.unheard_seconds)", text, self._seconds)
        return None


_MEANS = "a process or a host is stopped, the network between is broken, or one long call keeps all threads waiting"
