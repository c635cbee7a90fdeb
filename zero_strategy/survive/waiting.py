"""The wait of those who are left for as many ranks as the training needs, and what is said about it.

Ranks that divide slots alone go on with fewer. Those that hold parts of one model cannot: they wait until the dead are
there again, started by their agent, or by another host's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from zero_strategy.survive.membership import HEARTBEAT_SECONDS, Member, World

_logger = logging.getLogger(__name__)


class RanksMissingError(RuntimeError):
    """Too few ranks are there for the training's layout, and others have not come in time; names them."""


def wait_to_fit(world: World, ask: Callable[[], World], places: int, before: Sequence[Member], seconds: float) -> World:
    """Ask until members fit the layout, and this process is one of them; returns these.

    Args:
        world: Those who are there.
        ask: Asks the lighthouse once more.
        places: How many processes were launched.
        before: Members of the formation that is no more.
        seconds: Longest wait for others where none can go on.

    Raises:
        RanksMissingError: After that time.
    """
    missing: _Missing | None = None
    while (found := world.fitting()).waits:
        if found.size:  # others train; the answer comes when they ask, or are gone
            missing = None
        else:
            missing = missing or _Missing(places, before)
            missing.look(world, seconds)
            time.sleep(HEARTBEAT_SECONDS)
        world = ask()
    return found


class _Missing:
    """Places that nobody has, and since when."""

    def __init__(self, places: int, before: Sequence[Member]) -> None:
        self._places, self._begun = places, time.monotonic()
        self._before = {each.place: each for each in before}
        self._since: dict[int, float] = {}

    def look(self, world: World, seconds: float) -> None:
        """See who is missing, and say so whenever it is somebody else."""
        there = {each.place for each in world.members}
        now = {place: self._since.get(place, time.time()) for place in range(self._places) if place not in there}
        changed, self._since = now.keys() != self._since.keys(), now
        layout = world.layout
        text = f"{world.size} of {layout.least} ranks are there that the training needs ({layout.why}): {self._named()}"
        if time.monotonic() - self._begun > seconds:
            raise RanksMissingError(
                f"{text}; survive.wait_seconds, {seconds:g}, are over: start the run again, and it goes on from its "
                "last checkpoint"
            )
        if changed:
            _logger.warning("%s; waiting for up to %g s", text, seconds)

    def _named(self) -> str:
        return ", ".join(map(self._name, self._since))

    def _name(self, place: int) -> str:
        known = self._before.get(place)
        who = "" if known is None else f" (process {known.card.pid} of {known.address})"
        clock = time.strftime("%H:%M:%S", time.localtime(self._since[place]))
        return f"place {place}{who} is missing since {clock}"
