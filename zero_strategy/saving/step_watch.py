"""What happens at optimizer steps besides the update: they are counted, and what befell one rank is acted on by all.

Ranks exchange flags with the message that ends every reduction of gradients, so all of them see the same flags before
the same step, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntFlag
from typing import Any

from zero_strategy.saving.saver import Saver

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
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.taken = self.skipped = 0
        self.signalled = self.terminating = False
        self._at_boundary: Callable[[Due], object] | None = None
        self._skips = self._save_failed = False
        self._due = Due.NOTHING

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

    @contextmanager
    def at_boundary(self, call: Callable[[Due], object] | None) -> Iterator[None]:
        """In the block this is called on all ranks after the step before which some rank was signalled."""
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
        self._skips = False
        if self._due and self._at_boundary is not None:
            self._at_boundary(self.take_due())

    def own_flags(self) -> int:
        """What all ranks shall learn of with the next reduction."""
        return _SAVE_FAILED * self._saver.failed() | self.wanted()

    def _note(self, flags: int) -> None:
        self._due |= Due(flags & (Due.SAVE | Due.END))
        self._save_failed |= bool(flags & _SAVE_FAILED)
