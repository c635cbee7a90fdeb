"""Step counters, flags agreed by all ranks at a step, and a save when a scheduler gives notice.

`StepWatch` counts steps; an event on one rank is acted on by all of them.

Ranks exchange flags with the message that ends every reduction of gradients, so all of them see the same flags before
the same step, at no cost.

A signal that any rank got makes all ranks save at the next step boundary.

    with engine.save_on_signal("checkpoints/preempted"):
        for batch in loader:
            ...
            optimizer.step()            # saves here, if some rank got a signal before

A handler only sets a flag; ranks tell each other with the next reduction of gradients (`StepWatch`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntFlag
from types import FrameType
from typing import Any, Literal, Protocol

import torch

from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.checkpoint.save import Saver
from zero_strategy.checkpoint.save_job import PendingSave
from zero_strategy.train_state import TrainState

# Beside the bits of `Due`: they travel in one number.
_SAVE_FAILED = 1


class Due(IntFlag):
    """Action of all ranks at a step boundary, since one of them got a signal."""

    NOTHING = 0
    SAVE = 2
    END = 4
    """Then end; comes with SAVE."""


class Counted(Protocol):
    """Further counts beside those of steps, in checkpoints with them."""

    def counters(self) -> dict[str, int]:
        """For the manifest."""

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on from those of a checkpoint."""


class StepWatch:
    """Steps of one engine; with several optimizers, one step is a step of each.

    Attributes:
        taken: Optimizer steps taken, those before a resumed checkpoint included.
        skipped: Steps skipped because gradients were not finite (fp16, or `nonfinite_gradients: skip`).
        signalled: Whether this rank wants all to save at the next step boundary; set by a signal handler.
        terminating: Whether this rank wants all to save and end there; likewise.
        beside: What counts beside steps; None: nothing does.
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.taken = self.skipped = 0
        self.signalled = self.terminating = False
        self.beside: Counted | None = None
        self._at_boundary: Callable[[Due], object] | None = None
        self._skips = self._save_failed = False
        self._due = Due.NOTHING

    def counters(self) -> dict[str, int]:
        """For the manifest."""
        further = {} if self.beside is None else self.beside.counters()
        return {"global_steps": self.taken, "skipped_steps": self.skipped, **further}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on counting from those of a checkpoint."""
        self.taken = int(counters.get("global_steps") or 0)
        self.skipped = int(counters.get("skipped_steps") or 0)
        if self.beside is not None:
            self.beside.load_counters(counters)

    def wanted(self) -> Due:
        """Action that this rank wants of all."""
        return (Due.SAVE | Due.END) if self.terminating else Due.SAVE if self.signalled else Due.NOTHING

    def take_due(self, agreed: Due = Due.NOTHING) -> Due:
        """Action that all ranks have agreed on since this was called last; `agreed` came about otherwise.

        A signal may come after the agreement and before this. Saving serves it too; ending waits to be agreed upon.
        """
        due, self._due = self._due | agreed, Due.NOTHING
        if due:
            # Any save serves it.
            self.signalled = False
        if due & Due.END:
            self.terminating = False
        return due

    @contextmanager
    def at_boundary(self, call: Callable[[Due], object] | None) -> Iterator[None]:
        """Let this be called, in the block, on all ranks after the step before which a rank was signalled."""
        earlier, self._at_boundary = self._at_boundary, call
        try:
            yield
        finally:
            self._at_boundary = earlier

    def before(self, flags: int, *, skipped: bool) -> None:
        """Before an optimizer's step.

        Args:
            flags: Those that all ranks have agreed upon since the last step; see `own_flags`.
            skipped: The step is not to be taken.

        Raises:
            OSError, ValueError, RuntimeError: Why a save in the background failed, on this rank or on another.
        """
        self._skips = self._skips or skipped
        self._note(flags)
        failed, self._save_failed = self._save_failed, False
        if failed:
            # On ranks whose own part went well, too: the board gives a save one outcome, and all raise before one step.
            self._saver.wait()

    def skip(self) -> None:
        """The step that goes on is not taken."""
        self._skips = True

    def after(self, flags: int) -> None:
        """After the last optimizer's step; with a closure gradients were reduced, and flags agreed upon since."""
        self._note(flags)
        if self._skips:
            self.skipped += 1
        else:
            self.taken += 1
        # Only here: with several optimizers the first that skips is not the last that steps.
        self._skips = False
        if self._due and self._at_boundary is not None:
            self._at_boundary(self.take_due())

    def own_flags(self) -> int:
        """Message to all ranks with the next reduction."""
        return _SAVE_FAILED * self._saver.failed() | self.wanted()

    def _note(self, flags: int) -> None:
        self._due |= Due(flags & (Due.SAVE | Due.END))
        self._save_failed |= bool(flags & _SAVE_FAILED)


class CheckpointingEngine(TrainState, Protocol):
    """A training with its saver and its step counters; see `ZeroEngine`."""

    saver: Saver
    steps: StepWatch

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        user: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        own_files: Mapping[str, bytes] | None = None,
        optimizers: bool = True,
        update_latest: bool = True,
        asynchronous: bool = False,
        weights_dtype: torch.dtype | None = None,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave: ...

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        strict: bool = True,
        optimizers: bool = True,
        weights: Callable[[StateReader], None] | None = None,
    ) -> StateReader: ...


EXIT_CODE = 143
"""What a shell makes of a process that SIGTERM ended: 128 + 15."""

_GOES_ON = ("SIGUSR1", "SIGUSR2")
"""After these training goes on; after any other it ends."""


def named_signals(names: Iterable[str]) -> list[signal.Signals]:
    """Signals that this platform has."""
    return [getattr(signal, name) for name in dict.fromkeys(names) if hasattr(signal, name)]


class Preempted(SystemExit):
    """Raised on all ranks after the save that SIGTERM asked one of them for; the exit code is 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class SignalWatch:
    """Handlers that tell a `StepWatch` of signals; the handlers before them are called too.

    The second signal that ends finds the handlers before: what it did then, it does now.

    Args:
        steps: Who is told.
        signals: Which.
        previous: What a signal's handler was before; default: the one in place when `install` is called.
        goes_on: Signals after which training goes on, beside SIGUSR1 and SIGUSR2.

    Attributes:
        came: The first signal that ends, once it has come.
        seen: Signals that have come, until their owner takes them out.

    Raises:
        ValueError: Outside of the main thread, where Python sets no handlers.
    """

    def __init__(
        self,
        steps: StepWatch,
        signals: Iterable[int],
        previous: Callable[[int], Any] = signal.getsignal,
        goes_on: Collection[int] = (),
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal handlers can be set in the main thread only; call it there")
        self._steps = steps
        self.came: int | None = None
        self.seen: set[int] = set()
        self._goes_on = frozenset(goes_on)
        self._replaced = {number: signal.getsignal(number) for number in signals}
        self._previous = {number: previous(number) for number in self._replaced}

    def install(self) -> None:
        """Set the handlers."""
        for number in self._replaced:
            signal.signal(number, self._handle)

    def restore(self, *, previous: bool = False) -> None:
        """Put back the handlers that `install` replaced, or the `previous` ones, where they were not replaced since."""
        for number, handler in (self._previous if previous else self._replaced).items():
            # Not `is`: a bound method is another object each time.
            if signal.getsignal(number) == self._handle:
                # None stands for a handler that was not set from Python, which cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        self.seen.add(number)
        if signal.Signals(number).name in _GOES_ON or number in self._goes_on:
            self._steps.signalled = True
        elif self.came is not None:
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
            # Raised anew: by its default action alone a process ends as one that the signal has ended.
            signal.raise_signal(number)
            return
        else:
            self._steps.terminating, self.came = True, number
        # Python's own would raise KeyboardInterrupt in the middle of the step that is to be saved.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


@contextmanager
def save_on_signal(
    engine: CheckpointingEngine,
    directory: str | os.PathLike[str],
    *,
    signals: Iterable[int] | None = None,
    save: Callable[[], object] | None = None,
    at_call: bool = False,
) -> Iterator[Callable[[], None]]:
    """Let a signal to any rank in the block make all ranks save after their next optimizer step.

    After SIGUSR1 and SIGUSR2 training goes on; after any other signal `Preempted` (a `SystemExit`, code 143) is raised
    on all ranks. A second one does what it did before the block, and so does one that finds no step any more.

    Args:
        engine: Whose steps, and what is saved.
        directory: The checkpoint; replaced if it exists.
        signals: Which; default: SIGTERM, and SIGUSR1 where there is one. Handlers that they had are called too, and
            come back at the end.
        save: Called on all ranks instead of `engine.save(directory)`.
        at_call: Save where the block's value is called, on all ranks, and not inside of `optimizer.step()`: at the end
            of a step whose scheduler and counters are to be in the checkpoint.

    Raises:
        ValueError: Outside of the main thread.
    """
    steps = engine.steps
    watch = SignalWatch(steps, named_signals(("SIGTERM", "SIGUSR1")) if signals is None else signals)
    if save is None:

        def save() -> object:
            return engine.save(directory)

    def boundary(due: Due) -> None:
        assert save is not None
        save()
        # What is due may be the end, and a caller's own `save` may go on in the background.
        engine.saver.wait()
        if due & Due.END:
            raise Preempted

    def call() -> None:
        due = steps.take_due()
        if due:
            boundary(due)

    ended = False
    with steps.at_boundary(None if at_call else boundary):
        # Inside: a signal that comes at once finds somebody who saves.
        watch.install()
        try:
            yield call
            ended = True
        finally:
            # Before what is left is taken: no signal is noted any more that nobody would act on.
            watch.restore()
            steps.take_due(Due.SAVE | Due.END)  # what is left of it
    # Behind the block, where the handlers are those of before.
    if ended and watch.came is not None:
        signal.raise_signal(watch.came)
