"""A thread that looks at what ranks wait for, now and then, and sleeps where nobody waits."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

_LONGEST = 3600.0
_EXIT_SECONDS = 2.0
"""How long a look may take that goes on at exit, when no thread may be inside of a call of torch's."""


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
        atexit.register(self._state.leave)
        weakref.finalize(self, _drop, self._state).atexit = False

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
        self._state.signals.put(None)

    def stop(self) -> None:
        """Ends the thread."""
        self._state.stop()


class _State:
    def __init__(self) -> None:
        self.lookers: list[tuple[weakref.ref[Looker], list[float]]] = []
        self.signals: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. Not an event: a collection in that very thread may stop it, inside of whatever it does."""
        self.poked = self.stopped = False
        self.thread: threading.Thread | None = None

    def stop(self) -> None:
        self.stopped = True
        self.signals.put(None)

    def leave(self) -> None:
        """At exit."""
        self.stop()
        if self.thread is not None:
            self.thread.join(_EXIT_SECONDS)


def _drop(state: _State) -> None:
    state.stop()
    if state.thread is None:
        atexit.unregister(state.leave)


def _run(state: _State) -> None:
    try:
        _look_around(state)
    finally:
        atexit.unregister(state.leave)  # not before: the process may exit while the last look goes on


def _look_around(state: _State) -> None:
    while not state.stopped:
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
        with suppress(Empty):
            state.signals.get(timeout=min(max(due - time.monotonic(), 0.001), _LONGEST))
            while True:
                state.signals.get_nowait()
