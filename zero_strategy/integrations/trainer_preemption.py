"""Saving under the Trainer when a scheduler gives notice by a signal (`checkpoint.preemption_signals`).

During a fit the handlers of `saving.preemption` stand in for Lightning's own handler of SIGTERM, which begins a
collective inside of the signal handler and so needs all ranks to be signalled at the same moment. All ranks learn of
the signal at an optimizer step, save at the end of that batch, and leave by Lightning's own exception.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from zero_strategy.checkpoint.preemption import EXIT_CODE, Due, SignalWatch, named_signals

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.config import ZeroConfig
    from zero_strategy.engine import ZeroEngine
else:
    _Base = object

FILE_NAME = "preempted.ckpt"
"""The checkpoint, in the Trainer's `default_root_dir`."""


class BatchEnd(_Base):
    """The callback that saves: the last one, when the Trainer's counters and other callbacks are done with a batch.

    Args:
        strategy: Whose.
    """

    def __init__(self, strategy: TrainerPreemption) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save if a signal came before this batch's optimizer step."""
        assert self._strategy.engine is not None
        self._strategy.act_on_signal(trainer, self._strategy.engine.steps.take_due())


class TrainerPreemption(_Base):
    """The part of `TrainerStrategy` that heeds signals."""

    batch_end_class: ClassVar[type[BatchEnd]]
    """`BatchEnd` as a callback of the Trainer's namespace."""
    sigterm_exception: ClassVar[type[BaseException]]
    """What Lightning leaves the Trainer by."""

    config: ZeroConfig
    engine: ZeroEngine | None
    _signal_watch: SignalWatch | None = None

    def barrier(self, name: str | None = None) -> None:
        """A meeting of all ranks; that before the first loop of a fit comes right after Lightning has set handlers."""
        super().barrier(name)
        if name == "run-stage":
            self._watch_signals()

    def on_train_start(self) -> None:
        """Before the first batch."""
        self._watch_signals()
        super().on_train_start()

    def _watch_signals(self) -> None:
        """Set the handlers, in the main thread, unless they are set.

        Not before Lightning's: what is tried before the fit (a search for the learning rate) would set ours first, and
        Lightning's would be put over them, and in the end ours back.
        """
        trainer = self.lightning_module.trainer
        originals = trainer._signal_connector._original_handlers
        if self._signal_watch is not None or self.engine is None or trainer.state.fn != "fit" or not originals:
            return
        numbers = watched_signals(self.config, self.cluster_environment)
        if numbers and threading.current_thread() is threading.main_thread():
            # Lightning's handlers are replaced, the ones before those are called.
            self._signal_watch = SignalWatch(self.engine.steps, numbers, originals.get)
            self._signal_watch.install()
            trainer.callbacks.append(self.batch_end_class(self))

    def forget_signals(self) -> None:
        """Put back Lightning's handlers."""
        watch, self._signal_watch = self._signal_watch, None
        if watch is not None and self.engine is not None:
            watch.restore()
            self.engine.steps.take_due(Due.SAVE | Due.END)
            trainer = self.lightning_module.trainer
            trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, BatchEnd)]

    def on_train_end(self) -> None:
        """The last place where all ranks meet: a signal since the last step is acted upon."""
        super().on_train_end()
        if self._signal_watch is not None:
            assert self.engine is not None
            wanted = self.engine.mesh.world_group.control.all_gather_objects(int(self.engine.steps.wanted()))
            agreed = Due.NOTHING
            for one in wanted:
                agreed |= Due(one)
            self.act_on_signal(self.lightning_module.trainer, self.engine.steps.take_due(agreed))

    def act_on_signal(self, trainer: Any, due: Due) -> None:
        """Save, and leave if that is due. All ranks come here with the same.

        Raises:
            SIGTERMException: Lightning's, a `SystemExit` with code 143, on all ranks.
        """
        if not due:
            return
        path = os.path.join(trainer.default_root_dir, FILE_NAME)
        trainer.save_checkpoint(path)
        self.finish_saves()
        if trainer.is_global_zero:
            then = "ends" if due & Due.END else "goes on"
            logger = logging.getLogger(type(trainer).__module__.partition(".trainer")[0])
            logger.warning(f"Saved after a signal; training {then}. Resume by trainer.fit(..., ckpt_path={path!r})")
        if due & Due.END:
            trainer._signal_connector.received_sigterm = True
            raise self.sigterm_exception(EXIT_CODE)


def watched_signals(config: ZeroConfig, environment: Any) -> list[signal.Signals]:
    """Those of the config that this platform has, and that SLURM's automatic requeueing does not use."""
    requeues = type(environment).__name__ == "SLURMEnvironment" and environment.auto_requeue
    taken = environment.requeue_signal if requeues else None
    return [number for number in named_signals(config.checkpoint.preemption_signals) if number != taken]
