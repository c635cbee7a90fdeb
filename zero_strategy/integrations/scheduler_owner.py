"""Under automatic optimization the Trainer steps schedulers; a `training_step` that does so, too, is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def schedulers_left_alone(module: Any) -> Iterator[None]:
    """Raise if what runs inside steps a scheduler that the Trainer steps.

    Args:
        module: The LightningModule; with manual optimization its schedulers are its own, and nothing is watched.

    Raises:
        RuntimeError: Then; names the scheduler and both who step it.
    """
    schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
    if not module.automatic_optimization or not schedulers:
        yield
        return
    before = [_count(scheduler) for scheduler in schedulers]
    yield
    for scheduler, count in zip(schedulers, before, strict=True):
        if _count(scheduler) != count:
            kind = type(scheduler).__name__
            raise RuntimeError(
                f"both the Trainer and {type(module).__name__}.training_step step the {kind}: the Trainer does it at "
                "the interval that configure_optimizers gives. Drop scheduler.step() from training_step, or set "
                "automatic_optimization = False"
            )


def _count(scheduler: Any) -> Any:
    """Number of times a scheduler was stepped, where it tells."""
    return getattr(scheduler, "last_epoch", None)
