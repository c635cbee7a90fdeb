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
        self._known: Any = None

    def stepped(self, scheduler: Any) -> None:
        """Call it when the engine has stepped the scheduler."""
        self._seen = _count(scheduler)

    def forget(self) -> None:
        """Call it when something else may rightly have moved the scheduler, such as a checkpoint."""
        self._seen = None

    def check(self, scheduler: Any, optimizer: Optimizer | None) -> None:
        """Raise if somebody else has stepped it, or if it is a new one that was made for another optimizer.

        Raises:
            RuntimeError: If it was stepped.
            ValueError: If it is another optimizer's; see `check_scheduler_of`.
        """
        if scheduler is not self._known:
            if scheduler is not None and optimizer is not None:
                check_scheduler_of(scheduler, optimizer)
            self._known, self._seen = scheduler, None
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
    made_for = _optimizers_of(scheduler)
    if made_for and not any(other is optimizer for other in made_for):
        other, used = type(made_for[0]).__name__, type(optimizer).__name__
        raise ValueError(
            f"the {type(scheduler).__name__} changes the learning rates of another optimizer ({other}) than the one "
            f"that is trained with ({used}), whose rates would stay as they are; pass a callable, lr_scheduler=lambda "
            "optimizer: ..., which makes it of that optimizer, or pass the other one to initialize(optimizer=...)"
        )


def _optimizers_of(scheduler: Any) -> list[Optimizer]:
    """What a scheduler was made for, or the schedulers that it holds, if it is made of others."""
    held = [scheduler, *getattr(scheduler, "__dict__", {}).values()]
    inner = [entry for value in held if isinstance(value, (list, tuple)) for entry in value]
    found = (getattr(one, "optimizer", None) for one in (*held, *inner) if callable(getattr(one, "step", None)))
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def _count(scheduler: Any) -> int | None:
    """How often a scheduler was stepped, where it tells."""
    count = getattr(scheduler, "last_batch_iteration", getattr(scheduler, "last_epoch", None))
    return count if isinstance(count, int) else None
