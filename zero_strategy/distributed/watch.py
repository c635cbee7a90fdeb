"""A thread that looks at what ranks wait for, now and then, and sleeps where nobody waits."""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import Protocol

_LONGEST = 3600.0


class Looker(Protocol):
    """What is looked at."""

    def look(self) -> float:
        """Have a look; returns the seconds until the next one, `math.inf`: not before `Watch.poke`."""


class Watch:
    """One daemon thread for several lookers, which it holds weakly. It starts with the first and ends with this object.

    Nothing that a looker does may take long, or wait for another rank.
    """

    def __init__(self) -> None:
        self._state = _State()
        weakref.finalize(self, self._state.stop)

    def add(self, looker: Looker) -> None:
        """Look at this too, at once for the first time."""
        self._state.lookers.append((weakref.ref(looker), [0.0]))
        if self._state.thread is None:
            self._state.thread = threading.Thread(target=_run, args=(self._state,), name="zero-watch", daemon=True)
            self._state.thread.start()
        self.poke()

    def poke(self) -> None:
        """Look now."""
        self._state.poked = True
        self._state.awake.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._state.stop()


class _State:
    def __init__(self) -> None:
        self.lookers: list[tuple[weakref.ref[Looker], list[float]]] = []
        self.awake = threading.Event()
        self.poked = self.stopped = False
        self.thread: threading.Thread | None = None

    def is_stopped(self) -> bool:
        return self.stopped

    def stop(self) -> None:
        self.stopped = True
        self.awake.set()


def _run(state: _State) -> None:
    while not state.stopped:
        state.awake.clear()
        if state.is_stopped():  # between the two lines before
            return
        poked, state.poked, due = state.poked, False, math.inf
        for entry in list(state.lookers):
            reference, at = entry
            looker = reference()
            if looker is None:
                state.lookers.remove(entry)
                continue
            now = time.monotonic()
            if poked or at[0] <= now:
                at[0] = now + looker.look()
            due = min(due, at[0])
            del looker  # nothing is kept alive while the thread sleeps
        state.awake.wait(min(max(due - time.monotonic(), 0.001), _LONGEST))
