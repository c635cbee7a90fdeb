"""Calls that are still safe after an exception on one rank, while the others may wait in a collective."""

from __future__ import annotations

import atexit
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zero_strategy.comm.barrier import StoreBarrier

AGREEMENT_SECONDS = 10.0
"""How long a failed rank waits for the others to have failed at the same place too."""

_CHILD_SECONDS = 2.0

_numbers = itertools.count()


class FailureAgreement:
    """True if all ranks are in exception handling together, as after Ctrl-C, so that they may save a checkpoint.

    Until `forget` is called the ranks are asked once only.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, AGREEMENT_SECONDS)
        self._name = f"exception{next(_numbers)}"
        self._together: bool | None = None
        self._barrier: StoreBarrier | None = None

    def together(self, place: str) -> bool:
        """True if every rank has come here, at the same `place`; False at the latest after ten seconds."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        if self._together is None:
            if self._barrier is None:
                rank, world = dist.get_rank(), dist.get_world_size()
                self._barrier = StoreBarrier(rank, world, self._seconds, self._name)
            try:
                self._barrier.wait_for_all(f"going on after an exception, {place},")
                self._together = True
            except RuntimeError:  # nobody came, or the store is gone with its rank
                self._together = False
        return self._together

    def forget(self) -> None:
        """Ask again next time."""
        self._together = None


def end_children_at_exit(launcher: Any) -> None:
    """Let no child process outlive this one, should the exception end it.

    A child that waits in a collective for this rank does not notice; nor does it heed SIGTERM there.
    """
    children = [child for child in getattr(launcher, "procs", []) if isinstance(child, subprocess.Popen)]
    if children:
        atexit.register(_end, children)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _CHILD_SECONDS
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
