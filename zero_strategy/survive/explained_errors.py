"""Errors of a training function that a death explains, after which it is called again.

    a process is gone, stopped, silent, or has left      the watchdog says so
    members have changed                                 a copy's end, or a formation has found it
    connections of groups have broken                    others have left, who may have known of a death before
    ranks wait for each other                            a few times: ones that are slow look like it for a second

Any other error is the function's own, would come again, and is raised; but for one that comes as a process dies.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from zero_strategy.comm.meeting import RankGoneError
from zero_strategy.comm.store import BarrierError, FailedElsewhereError
from zero_strategy.survive.formation import MembersChangedError
from zero_strategy.survive.history import OF_GROUPS
from zero_strategy.survive.membership import World
from zero_strategy.watchdog.diagnosis import DesyncError

LEFT = "left"
"""Kind of failure: a rank has left the function, and its process is there."""
_DEATHS = {"gone", "stopped", "silent", LEFT}
_MOST_VAIN = 8
"""Beginnings after each other that come to no end of a step."""
_GONE_SECONDS = 2.0
"""In which a process ends whose connections have broken."""


class ExplainedErrors:
    """Decides whether the training goes on after an error, by what came before."""

    def __init__(self) -> None:
        self._vain = 0

    def step_taken(self) -> None:
        """A step is over: errors before it count no more."""
        self._vain = 0

    def check_explained(self, error: Exception, world: World) -> None:
        """Raise an error that no death explains.

        Args:
            error: It has left the training function, or its formation.
            world: The ranks that trained.
        """
        if isinstance(error, MembersChangedError):
            return
        failure = error.failure if isinstance(error, DesyncError) else None
        if failure is not None and failure.kind in _DEATHS:
            return
        self._vain += 1
        if isinstance(error, DesyncError):
            if failure is not None and failure.kind == "locked" and self._vain < _MOST_VAIN:
                return
            raise error
        if _is_of_groups(error) and self._vain < _MOST_VAIN:
            return
        end = time.monotonic() + _GONE_SECONDS
        while not world.gone():
            if time.monotonic() > end:
                raise error
            time.sleep(0.05)


def _is_of_groups(error: Exception) -> bool:
    if isinstance(error, (dist.DistError, BarrierError, FailedElsewhereError, RankGoneError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OF_GROUPS)
