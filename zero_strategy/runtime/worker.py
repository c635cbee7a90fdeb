"""A thread that runs jobs in order, beside the computation.

Gloo's point-to-point calls block their caller for milliseconds while another transfer holds the connection. Here they
block a thread of their own, and every rank's thread works its queue off in the same order.

When the interpreter ends, no thread may be inside of a call of torch's: one that comes back from it then ends the whole
process ("terminate called without an active exception", exit code 134), since Python makes it leave by an exception
that C++ does not let through.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

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
    """At exit: let the thread end, with what it waits for if need be."""
    if not threads or not threads[0].is_alive():  # in a fork, for one
        return
    jobs.put(None)
    threads[0].join(_EXIT_SECONDS if getattr(sys, "last_value", None) is None else _FAILED_SECONDS)
    for reference in interrupts:
        if threads[0].is_alive() and (interrupt := reference()) is not None:
            with contextlib.suppress(Exception):
                interrupt()
            threads[0].join(_FAILED_SECONDS)
