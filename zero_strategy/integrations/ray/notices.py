"""Ray's notices of preemption: a report by all workers before a node goes.

Ray tells each worker that a node is about to be taken away (a spot instance, `ray drain-node`), at moments of their
own. A worker passes it on with its next reduction of gradients, as it does a signal (`checkpoint.preemption`), so that
all of them report after the same step, and no step waits for Ray. Training goes on until the node is gone; Ray then
starts the workers anew, with those nodes that are left, from that report.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.train

from zero_strategy.checkpoint.preemption import CheckpointingEngine, Due, StepWatch


class NoticeWatch:
    """Notices of Ray to this worker, told to the step counters of its engine.

    Args:
        steps: Who is told; see `engine.steps`.
    """

    def __init__(self, steps: StepWatch) -> None:
        self._steps = steps
        self._known: Any = None
        self._can_look = True

    def look(self) -> None:
        """Let all workers act after the next step, if this one has got a notice that it has not passed on."""
        if not self._can_look:
            return
        try:
            notice = own_notice()
        except (ImportError, AttributeError) as error:  # the name is Ray's own, and may move
            self._can_look = False
            warnings.warn(
                f"Ray {ray.__version__} does not tell its notices of preemption as Ray 2.60 does ({error}): workers do "
                "not report before a node goes. Use Ray 2.60, or report more often",
                stacklevel=2,
            )
            return
        if notice is not None and notice != self._known:  # of another node, or of an earlier end
            self._known = notice
            self._steps.signalled = True

    def due(self) -> bool:
        """True on all workers after the step before which one of them has passed a notice on."""
        return bool(self._steps.take_due())

    def forget(self) -> None:
        """Leave nothing for what counts these steps next."""
        self._steps.take_due(Due.SAVE)


@contextmanager
def save_on_notice(engine: CheckpointingEngine, save: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Let a notice of Ray to any worker in the block make all of them save; training goes on.

        with save_on_notice(engine, lambda: report({"step": step}, engine.save)) as boundary:
            for step in ...:
                ...
                optimizer.step()
                boundary()                              # on all workers

    Args:
        engine: Whose steps; of an Accelerator, `engine_of(accelerator)`.
        save: Called on all workers, where the block's value is called after the step that follows a notice.
    """
    watch = NoticeWatch(engine.steps)

    def boundary() -> None:
        if watch.due():
            save()
        watch.look()

    watch.look()
    try:
        yield boundary
    finally:
        watch.forget()


def own_notice() -> Any:
    """This worker's notice, a `PreemptionInfo`; None without one.

    Ray's public `get_preemption_info` makes all workers meet at one actor, which no step can afford.

    Raises:
        RuntimeError: Outside of a worker of Ray Train.
    """
    ray.train.get_context()
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().preemption_context.preemption_info
