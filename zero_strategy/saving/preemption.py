"""Saving when a scheduler gives notice by a signal: at the next step boundary, by all ranks, whichever rank got it.

    with engine.save_on_signal("checkpoints/preempted"):
        for batch in loader:
            ...
            optimizer.step()            # saves here, if some rank got a signal before

A handler only sets a flag; ranks tell each other with the next reduction of gradients (`step_watch`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from zero_strategy.saving.step_watch import Due, StepWatch

if TYPE_CHECKING:
    import os

    from zero_strategy.saving.checkpointing import CheckpointingEngine

EXIT_CODE = 143
"""What a shell makes of a process that SIGTERM ended: 128 + 15."""

_GOES_ON = ("SIGUSR1", "SIGUSR2")
"""After these training goes on; after any other it ends."""


def named_signals(names: Iterable[str]) -> list[signal.Signals]:
    """Those that this platform has."""
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

    Attributes:
        came: The first signal that ends, once it has come.

    Raises:
        ValueError: Outside of the main thread, where Python sets no handlers.
    """

    def __init__(
        self, steps: StepWatch, signals: Iterable[int], previous: Callable[[int], Any] = signal.getsignal
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal handlers can be set in the main thread only; call it there")
        self._steps = steps
        self.came: int | None = None
        self._replaced = {number: signal.getsignal(number) for number in signals}
        self._previous = {number: previous(number) for number in self._replaced}

    def install(self) -> None:
        """Set the handlers."""
        for number in self._replaced:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers that `install` replaced, where they were not replaced since."""
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if signal.Signals(number).name in _GOES_ON:
            self._steps.signalled = True
        elif self.came is not None:
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
            signal.raise_signal(number)
            return
        else:
            self._steps.terminating, self.came = True, number
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
    """In the block, a signal to any rank makes all ranks save after their next optimizer step.

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
        engine.saver.wait()
        if due & Due.END:
            raise Preempted

    def call() -> None:
        due = steps.take_due()
        if due:
            boundary(due)

    ended = False
    with steps.at_boundary(None if at_call else boundary):
        watch.install()
        try:
            yield call
            ended = True
        finally:
            watch.restore()
            steps.take_due(Due.SAVE | Due.END)  # what is left of it
    if ended and watch.came is not None:
        signal.raise_signal(watch.came)
