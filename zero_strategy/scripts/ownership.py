"""One owner of every step: the engine of a script steps the optimizer and the scheduler, and nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


class OptimizerGuard:
    """Refuses steps of an optimizer outside of `stepping()`, before anything has happened.

    A step by the script would take gradients that are neither clipped nor unscaled, and the engine's own would take
    them once more.

    Args:
        optimizer: To which nothing is attached yet, since hooks run in the order of their coming.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._open = False
        optimizer.register_step_pre_hook(self._check)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The engine's step is inside."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def _check(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if not self._open:
            raise RuntimeError(
                f"both the engine and the script step the {type(optimizer).__name__}: engine.step() does it at each "
                "boundary, clipped and unscaled. Drop optimizer.step() from the script"
            )


class SchedulerGuard:
    """Notices that a scheduler has moved since the engine stepped it; one that does not count its steps is not seen."""

    def __init__(self) -> None:
        self._seen: int | None = None

    def stepped(self, scheduler: Any) -> None:
        """Call it when the engine has stepped the scheduler."""
        self._seen = _count(scheduler)

    def forget(self) -> None:
        """Call it when something else may rightly have moved the scheduler, such as a checkpoint."""
        self._seen = None

    def check(self, scheduler: Any) -> None:
        """Raise if somebody else has stepped it.

        Raises:
            RuntimeError: Then.
        """
        if self._seen is not None and _count(scheduler) != self._seen:
            raise RuntimeError(
                f"both the engine and the script step the {type(scheduler).__name__}: engine.step() does it "
                "after each update. Drop scheduler.step() from the script, or do not pass the scheduler to initialize()"
            )


def check_scheduler_of(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise if a scheduler was made for another optimizer than the engine's.

    Raises:
        ValueError: Then; names both.
    """
    other = getattr(scheduler, "optimizer", optimizer)
    if isinstance(other, Optimizer) and other is not optimizer:
        used = type(optimizer).__name__
        raise ValueError(
            f"the {type(scheduler).__name__} was made for a {type(other).__name__} that is not the {used} that is "
            "trained with; pass a callable of the optimizer, lr_scheduler=lambda optimizer: ..., or that "
            "optimizer itself"
        )


def _count(scheduler: Any) -> int | None:
    """How often a scheduler was stepped, where it tells."""
    count = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return count if isinstance(count, int) else None
