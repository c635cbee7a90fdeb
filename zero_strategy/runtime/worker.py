"""Daemon threads: one that runs jobs in order, beside the computation, and one that looks at things now and then.

Gloo's point-to-point calls block their caller for milliseconds while another transfer holds the connection. Here they
block a thread of their own, and every rank's thread works its queue off in the same order.

When the interpreter ends, no thread may be inside of a call of torch's: one that comes back from it then ends the whole
process ("terminate called without an active exception", exit code 134), since Python makes it leave by an exception
that C++ does not let through.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

_Job = tuple[Callable[[], object], "Future[None]"]
_EXIT_SECONDS = 5.0
"""How long what is under way at exit is waited for: another rank may need it yet."""
_FAILED_SECONDS = 0.5
"""The same after an exception, and after connections were broken."""


class BackgroundWorker:
    """Runs jobs one after the other in a daemon thread, which starts with the first job and ends with this object.

    Args:
        name: Of the thread.
        interrupt: A method that ends what a job waits for, should that be under way at exit; its object is held weakly.
    """

    def __init__(self, name: str = "zero-exchange", interrupt: Callable[[], None] | None = None) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        ways = [] if interrupt is None else [weakref.WeakMethod(interrupt)]
        self._at_exit = partial(_leave, self._jobs, self._threads, ways)
        atexit.register(self._at_exit)
        weakref.finalize(self, _drop, self._jobs, self._threads, self._at_exit).atexit = False

    def submit(self, job: Callable[[], object]) -> Future[None]:
        """Queue a job, from any thread; the future's `result()` raises its exception, and drops what it returns."""
        if not self._threads:
            self._start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def _start(self) -> None:
        with self._starting:
            if not self._threads:
                # A daemon: a rank that waits for a dead peer must still be able to exit.
                thread = threading.Thread(target=_work, args=(self._jobs, self._at_exit), name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)


def _work(jobs: SimpleQueue[_Job | None], at_exit: Callable[[], None]) -> None:
    try:
        _run_jobs(jobs)
    finally:
        atexit.unregister(at_exit)  # not before: the process may exit while the last job ends


def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        failure: BaseException | None = None
        try:
            with torch.no_grad():
                job()
        except BaseException as error:
            failure = error
        del item, job  # the buffers they hold are free once the caller knows the result
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
        del future, failure


def _drop(jobs: SimpleQueue[_Job | None], threads: list[threading.Thread], at_exit: Callable[[], None]) -> None:
    jobs.put(None)
    if not threads:
        atexit.unregister(at_exit)


def _leave(
    jobs: SimpleQueue[_Job | None],
    threads: list[threading.Thread],
    interrupts: list[weakref.WeakMethod[Callable[[], None]]],
) -> None:
    """Let the thread end, at exit, with what it waits for if need be."""
    if not threads or not threads[0].is_alive():  # in a fork, for one
        return
    jobs.put(None)
    threads[0].join(_EXIT_SECONDS if getattr(sys, "last_value", None) is None else _FAILED_SECONDS)
    for reference in interrupts:
        if threads[0].is_alive() and (interrupt := reference()) is not None:
            with suppress(Exception):
                interrupt()
            threads[0].join(_FAILED_SECONDS)


_LONGEST = 3600.0
_LAST_LOOK_SECONDS = 2.0
"""How long a look may take that goes on at exit, when no thread may be inside of a call of torch's."""


class Looker(Protocol):
    """Operation that is looked at."""

    def look(self) -> float:
        """Have a look; returns the seconds until the next one, `math.inf`: not before `Watch.poke`."""


class Watch:
    """One daemon thread for a looker, which it holds weakly. It starts with that, and ends with this object.

    Nothing that the looker does may take long, or wait for another rank.
    """

    def __init__(self) -> None:
        self._state = _WatchState()
        atexit.register(self._state.leave)
        weakref.finalize(self, _drop_watch, self._state).atexit = False

    def start(self, looker: Looker) -> None:
        """Look at this, at once for the first time."""
        looked_at = self._state, weakref.ref(looker)
        self._state.thread = threading.Thread(target=_watch, args=looked_at, name="zero-watch", daemon=True)
        self._state.thread.start()

    def poke(self) -> None:
        """Look now."""
        self._state.poked = True
        self._state.signals.put(None)

    def stop(self) -> None:
        """Ends the thread."""
        self._state.stop()


class _WatchState:
    def __init__(self) -> None:
        self.signals: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. Not an event: a collection in that very thread may stop it, inside of whatever it does."""
        self.poked = self.stopped = False
        self.thread: threading.Thread | None = None

    def stop(self) -> None:
        self.stopped = True
        self.signals.put(None)

    def leave(self) -> None:
        """Let it end at exit."""
        self.stop()
        if self.thread is not None:
            self.thread.join(_LAST_LOOK_SECONDS)


def _drop_watch(state: _WatchState) -> None:
    state.stop()
    if state.thread is None:
        atexit.unregister(state.leave)


def _watch(state: _WatchState, reference: weakref.ref[Looker]) -> None:
    try:
        _look_around(state, reference)
    finally:
        atexit.unregister(state.leave)  # not before: the process may exit while the last look goes on


def _look_around(state: _WatchState, reference: weakref.ref[Looker]) -> None:
    due = 0.0
    while not state.stopped:
        poked, state.poked = state.poked, False
        looker = reference()
        if looker is None:
            return
        now = time.monotonic()
        if poked or due <= now:
            due = now + looker.look()
        del looker  # nothing is kept alive while the thread sleeps
        with suppress(Empty):
            state.signals.get(timeout=min(max(due - time.monotonic(), 0.001), _LONGEST))
            while True:
                state.signals.get_nowait()
