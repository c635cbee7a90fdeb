"""What happens at optimizer steps besides the update: they are counted, and what befell one rank is acted on by all.

Ranks exchange flags with the message that ends every reduction of gradients, so all of them see the same flags before
the same step, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntFlag
from typing import Any

from zero_strategy.saving.saver import Saver
from zero_strategy.sharding.reducer import GradientReducer

_SAVE_FAILED = 1


class Due(IntFlag):
    """What all ranks are to do at a step boundary, since one of them got a signal."""

    NOTHING = 0
    SAVE = 2
    END = 4
    """Then end; comes with SAVE."""


class StepWatch:
    """Steps of one engine; with several optimizers, one step is a step of each.

    Attributes:
        taken: Optimizer steps taken, those before a resumed checkpoint included.
        skipped: Steps skipped because gradients were not finite (fp16, or `nonfinite_gradients: skip`).
        signalled: Whether this rank wants all to save at the next step boundary; set by a signal handler.
        terminating: Whether this rank wants all to save and end there; likewise.
        at_boundary: Called on all ranks after the step before which some rank was signalled.
    """

    def __init__(self, reducer: GradientReducer, saver: Saver) -> None:
        self._reducer, self._saver = reducer, saver
        self.taken = self.skipped = 0
        self.signalled = self.terminating = False
        self.at_boundary: Callable[[Due], object] | None = None
        self._skips = False
        self._due = Due.NOTHING
        reducer.raise_flags = self._raised

    def counters(self) -> dict[str, int]:
        """For the manifest."""
        return {"global_steps": self.taken, "skipped_steps": self.skipped}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on counting from those of a checkpoint."""
        self.taken = int(counters.get("global_steps") or 0)
        self.skipped = int(counters.get("skipped_steps") or 0)

    def wanted(self) -> Due:
        """What this rank wants all to do."""
        return (Due.SAVE | Due.END) if self.terminating else Due.SAVE if self.signalled else Due.NOTHING

    def take_due(self, agreed: Due = Due.NOTHING) -> Due:
        """What all ranks have agreed to do since this was called last; `agreed` came about otherwise.

        A signal may come after the agreement and before this. Saving serves it too; ending waits to be agreed upon.
        """
        due, self._due = self._due | agreed, Due.NOTHING
        if due:
            self.signalled = False
        if due & Due.END:
            self.terminating = False
        return due

    def before(self, *, skipped: bool) -> None:
        """Before an optimizer's step.

        Raises:
            OSError, ValueError, RuntimeError: Why a save in the background failed, on this rank or on another.
        """
        self._skips = self._skips or skipped
        flags = self._collect()
        self._reducer.agreed_flags = 0
        if flags & _SAVE_FAILED:
            self._saver.wait()

    def skip(self) -> None:
        """The step that goes on is not taken."""
        self._skips = True

    def after(self) -> None:
        """After the last optimizer's step; with a closure gradients were reduced since `before`."""
        self._collect()
        if self._skips:
            self.skipped += 1
        else:
            self.taken += 1
        self._skips = False
        if self._due and self.at_boundary is not None:
            self.at_boundary(self.take_due())

    def _collect(self) -> int:
        """Note what the last reductions agreed upon; the rest of the flags."""
        flags = self._reducer.agreed_flags
        self._due |= Due(flags & (Due.SAVE | Due.END))
        self._reducer.agreed_flags = flags & ~(Due.SAVE | Due.END)
        return self._reducer.agreed_flags

    def _raised(self) -> int:
        return _SAVE_FAILED * self._saver.failed() | self.wanted()
