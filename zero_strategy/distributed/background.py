"""A thread that runs one communicator's exchanges in order, so that computing goes on meanwhile.

Gloo's point-to-point calls block their caller for milliseconds while another transfer holds the connection. Here they
block a thread of their own, and every rank's thread works its queue off in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch

_Job = tuple[Callable[[], None], "Future[None]"]


class BackgroundWorker:
    """Runs jobs one after the other in a daemon thread, which starts with the first job and ends with this object."""

    def __init__(self, name: str = "zero-exchange") -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job; its exception is raised by the future's `result()`."""
        if not self._started:
            self._started = True
            # A daemon: a rank that waits for a dead peer must still be able to exit.
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future


def _work(jobs: SimpleQueue[_Job | None]) -> None:
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
