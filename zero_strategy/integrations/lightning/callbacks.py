"""Callbacks, signals and exceptions of a Trainer's run.

Callbacks that unfreeze are helped when a run resumes; `NormLogging` logs norms of every parameter's gradient and
update.

Signals by which a scheduler gives notice (`checkpoint.preemption_signals`): during a fit the handlers of
`checkpoint.preemption` stand in for Lightning's own handler of SIGTERM, which begins a collective inside of the signal
handler and so needs all ranks to be signalled at the same moment. All ranks learn of the signal at an optimizer step,
save at the end of that batch, and leave by Lightning's own exception.

After an exception on one rank the others may wait in a collective: `FailureAgreement` tells which calls are safe.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zero_strategy.checkpoint.preemption import EXIT_CODE, Due, SignalWatch, named_signals
from zero_strategy.comm.store import StoreBarrier
from zero_strategy.diagnostics.norms import NormLog, NormSettings
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning.slurm_requeue import SlurmRequeue
from zero_strategy.runtime.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object

_NAMESPACES = ("lightning.", "pytorch_lightning.")


def restore_param_groups(trainer: Any, module: Any) -> None:
    """Let finetuning callbacks whose state was restored make their param groups again, and train what they trained.

    Lightning's `BaseFinetuning` does the first in `on_fit_start`, which comes before states of callbacks where a
    checkpoint is restored after `setup`. It freezes all anew in a run that resumes and leaves the second out, so that
    a backbone that had been unfrozen would stay as it is from there on.
    """
    for callback in trainer.callbacks:
        base: Any = next((cls for cls in type(callback).__mro__ if _is_finetuning(cls)), None)
        if base is None or not callback._restarting:
            continue
        known = _held(trainer)
        base.on_fit_start(callback, trainer, module)  # of the base alone: a subclass's own has run
        added = _held(trainer) - known
        for child in module.modules():
            own = [parameter for parameter in child.parameters(recurse=False) if id(parameter) in added]
            for parameter in own:
                parameter.requires_grad_(True)
            # Lightning's freezing switches it off.
            if own and isinstance(child, AnyBatchNorm):
                child.track_running_stats = True


def check_timers(trainer: Any) -> None:
    """Let timers whose state was restored stop a run that has no time left.

    Lightning's `Timer` looks in `on_fit_start`, which comes before states of callbacks where a checkpoint is restored
    after `setup`: each resume would train a batch more.
    """
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ == "Timer" and base.__module__.startswith(_NAMESPACES):
                timer: Any = base
                timer.on_fit_start(callback, trainer)  # of the base alone: a subclass's own has run


def _is_finetuning(cls: type) -> bool:
    return cls.__name__ == "BaseFinetuning" and cls.__module__.startswith(_NAMESPACES)


def _held(trainer: Any) -> set[int]:
    return {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}


class NormLogging(_Base):
    """Logs `zero/gradient_norm/PARAMETER` and `zero/update_norm/PARAMETER` to the Trainer's loggers.

    Gradients are those of a step, of all micro-batches and ranks, unscaled, before clipping.

    Args:
        every_n_steps: Optimizer steps from one that is measured to the next; default: the Trainer's
            `log_every_n_steps`.
        gradients: Log the norms of gradients: a pass over them.
        updates: Log by how much each parameter moves: a copy of what each rank owns, and a pass over it.

    Raises:
        ValueError: If there is nothing to log, or the number of steps is less than 1.
    """

    def __init__(self, every_n_steps: int | None = None, *, gradients: bool = True, updates: bool = False) -> None:
        super().__init__()
        self._every, self._settings = (
            every_n_steps,
            NormSettings(1 if every_n_steps is None else every_n_steps, gradients, updates),
        )
        self._log: NormLog | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin.

        Raises:
            ValueError: If the Trainer's strategy is none of these.
        """
        engine = getattr(trainer.strategy, "engine", None)
        if not isinstance(engine, ZeroEngine):
            raise ValueError(
                f"{type(self).__name__} reads sharded gradients, and the strategy is "
                f'{type(trainer.strategy).__name__}: take Trainer(strategy="zero3"), or '
                "lightning.pytorch.utilities.grad_norm for gradients of plain torch"
            )
        # The Trainer's is 0 where it logs nothing by itself.
        every = max(1, trainer.log_every_n_steps) if self._every is None else self._every
        self._log = NormLog(engine, replace(self._settings, every_n_steps=every))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure, if it is the step's turn."""
        assert self._log is not None
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._log.before_step(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what was measured."""
        assert self._log is not None
        if found := self._log.after_step():
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(found, step=self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let go of the engine."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the engine, as at the end."""
        self._end()

    def _end(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()


FILE_NAME = "preempted.ckpt"
"""The checkpoint, in the Trainer's `default_root_dir`."""


class BatchEnd(_Base):
    """The callback that saves: the last one, when the Trainer's counters and other callbacks are done with a batch.

    Args:
        signals: The strategy's.
    """

    def __init__(self, signals: SavesOnSignals) -> None:
        self._signals = signals

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save if a signal came before this batch's optimizer step."""
        self._signals.end_batch(trainer)


class SavesOnSignals:
    """Signals during the fits of a strategy: a checkpoint, and the end of the fit where that is due.

    Args:
        strategy: The Trainer's.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._watch: SignalWatch | None = None
        self._requeue: SlurmRequeue | None = None
        self._trainer: Any = None  # while there is a watch

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a Trainer set handlers in fits of their own."""
        return {**vars(self), "_watch": None, "_requeue": None, "_trainer": None}

    def watch(self) -> None:
        """Set the handlers, in the main thread, unless they are set.

        Not before Lightning's: what is tried before the fit (a search for the learning rate) would set ours first, and
        Lightning's would be put over them, and in the end ours back.
        """
        strategy = self._strategy
        trainer = strategy.lightning_module.trainer
        originals = trainer._signal_connector._original_handlers
        if self._watch is not None or strategy.engine is None or trainer.state.fn != "fit" or not originals:
            return
        self._requeue = SlurmRequeue.asked_by(strategy, originals)
        again = () if self._requeue is None else (self._requeue.number,)
        numbers = list(dict.fromkeys((*named_signals(strategy.config.checkpoint.preemption_signals), *again)))
        # Python lets the main thread alone set handlers.
        if numbers and threading.current_thread() is threading.main_thread():
            # Lightning's handlers are replaced, the ones before those are called.
            self._watch = SignalWatch(strategy.engine.steps, numbers, originals.get, goes_on=again)
            self._watch.install()
            self._trainer = trainer
            trainer.callbacks.append(strategy.batch_end_class(self))

    def forget(self) -> None:
        """Put back Lightning's handlers."""
        self._end(previous=False)

    def abandon(self) -> None:
        """Put back the handlers before Lightning's, in place of a Trainer that has left its own there."""
        # Python lets the main thread alone set handlers, and a fit may be in another one.
        if threading.current_thread() is threading.main_thread():
            self._end(previous=True)

    def _end(self, previous: bool) -> None:
        watch, self._watch = self._watch, None
        trainer, self._trainer = self._trainer, None
        engine = self._strategy.engine
        if watch is not None and engine is not None:
            watch.restore(previous=previous)
            # A signal that came too late for this fit must not end the next one.
            engine.steps.take_due(Due.SAVE | Due.END)
            trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, BatchEnd)]

    def end_batch(self, trainer: Any) -> None:
        """Act on what ranks agreed on at this batch's optimizer step."""
        assert self._strategy.engine is not None
        self._act(trainer, self._strategy.engine.steps.take_due())

    def end_training(self) -> None:
        """The last place where all ranks meet: a signal since the last step is acted upon."""
        engine = self._strategy.engine
        if self._watch is not None:
            assert engine is not None
            wanted = engine.mesh.world_group.control.all_gather_objects(int(engine.steps.wanted()))
            agreed = Due.NOTHING
            for one in wanted:
                agreed |= Due(one)
            self._act(self._strategy.lightning_module.trainer, engine.steps.take_due(agreed))

    def _act(self, trainer: Any, due: Due) -> None:
        """Save, and leave if that is due. All ranks come here with the same.

        Raises:
            SIGTERMException: Lightning's, a `SystemExit` with code 143, on all ranks.
        """
        if not due:
            return
        if self._requeue is not None and self._requeue.is_due(self._watch):
            self._requeue.save_and_requeue(trainer)
            if not due & Due.END:
                return
        path = os.path.join(trainer.default_root_dir, FILE_NAME)
        trainer.save_checkpoint(path)
        # A scheduler may kill the process soon after its notice.
        self._strategy.finish_saves()
        if trainer.is_global_zero:
            then = "ends" if due & Due.END else "goes on"
            logger = logging.getLogger(type(trainer).__module__.partition(".trainer")[0])
            logger.warning(f"Saved after a signal; training {then}. Resume by trainer.fit(..., ckpt_path={path!r})")
        if due & Due.END:
            # User code asks `trainer.received_sigterm`, which Lightning's own handler would have set.
            trainer._signal_connector.received_sigterm = True
            raise self._strategy.sigterm_exception(EXIT_CODE)


AGREEMENT_SECONDS = 10.0
"""How long a failed rank waits for the others to have failed at the same place too."""

_CHILD_SECONDS = 2.0

# Meetings of two strategies must not share keys of the store.
_numbers = itertools.count()


class FailureAgreement:
    """True if all ranks are in exception handling together, as after Ctrl-C, so that they may save a checkpoint.

    Until `forget` is called the ranks are asked once only.

    They meet under the engine's name, since engines are made by all ranks together. A script may make more strategies
    on one rank than on another, so their number names only what is asked before there is an engine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, AGREEMENT_SECONDS)
        self._name = f"strategy{next(_numbers)}"
        self._together: bool | None = None
        self._barriers: dict[str, StoreBarrier] = {}

    def together(self, place: str, engine: str = "") -> bool:
        """True if every rank has come here, at the same `place`; False at the latest after ten seconds.

        Args:
            place: In words.
            engine: The name of the engine that trains; "": there is none.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        if self._together is None:
            # The constructor comes before there is a process group. One for each name: it counts the meetings.
            key = f"exception.{engine or self._name}"
            if key not in self._barriers:
                rank, world = dist.get_rank(), dist.get_world_size()
                self._barriers[key] = StoreBarrier(rank, world, self._seconds, key)
            try:
                self._barriers[key].wait_for_all(f"going on after an exception, {place},")
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
            # Windows has no SIGKILL, and ends a process by SIGTERM at once.
            child.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
