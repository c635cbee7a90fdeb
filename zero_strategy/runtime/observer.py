"""Observers of an engine: the events that its parts report, at no cost while nobody listens.

One `Observed` is shared by an engine, its communicators, tiers and executor. Without an observer each place costs a
look at an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

Span = Literal[
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "control",
    "fetch",
    "copy",
    "disk",
    "compute",
    "bubble",
    "clip",
    "save",
    "load",
    "evaluation",
]
"""What takes the time of the thread that trains: waits for collectives by kind (`control`: flags, norms and objects);
`fetch`: for the own slice of a unit to come from a tier, before a gather; `copy`: between device and host memory or
within it; `disk`: waits for files; `bubble`: for another stage of a pipeline; the rest as it says."""

Transfer = Literal["all_gather", "reduce_scatter", "all_to_all", "disk_read", "disk_write"]
"""What moves bytes in the background."""

Mark = Literal["backward over", "step begins", "optimizer over", "step over", "loss", "batch", "timeline", "copied"]
"""`step begins`: of an optimizer; `optimizer over`: not the last one; `step over`: of all, with the number of steps
taken; `loss`: of a micro-batch, unscaled; `batch`: the inputs of a
micro-batch, where a forward has several; `timeline`: events of a pipeline; `copied`: a copy in memory is there, of a
run that survives deaths, with beginnings that are over and the run's history."""


class Observer(Protocol):
    """Somebody who listens; called from any thread, and never raises."""

    def span(self, kind: Span, name: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """Around something that this thread does or waits for.

        Args:
            kind: What.
            name: Of what, for people.
            nbytes: That it moves.
        """

    def transfer(self, kind: Transfer, nbytes: int) -> Callable[[], None]:
        """Bytes begin to move in the background; what is returned is called when they have, in any thread."""

    def forward(self, inputs: Any) -> AbstractContextManager[None]:
        """Around a forward of the whole module, one inside of another maybe.

        Args:
            inputs: What it computes with; None where that is unknown; of a pipeline the number of micro-batches, whose
                backwards are inside, too.
        """

    def mark(self, mark: Mark, value: Any = None) -> None:
        """Something has happened in the thread that trains."""

    def take_metrics(self) -> Mapping[str, float] | None:
        """For a logger, of the last step that was recorded; None if it was taken already."""


class Observed:
    """The place where an observer is put.

    Attributes:
        observer: Who listens; None: nobody.
        listeners: Called with each mark and its value, besides.
    """

    __slots__ = ("listeners", "observer")

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.listeners: list[Callable[[Mark, Any], None]] = []

    @property
    def hears_marks(self) -> bool:
        """True if somebody is told of marks."""
        return self.observer is not None or bool(self.listeners)

    def span(self, kind: Span, name: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """See `Observer.span`."""
        return _NOTHING if self.observer is None else self.observer.span(kind, name, nbytes)

    def forward(self, inputs: Any) -> AbstractContextManager[None]:
        """See `Observer.forward`."""
        return _NOTHING if self.observer is None else self.observer.forward(inputs)

    def mark(self, mark: Mark, value: Any = None) -> None:
        """See `Observer.mark`."""
        if self.observer is not None:
            self.observer.mark(mark, value)
        for listener in self.listeners:
            listener(mark, value)

    def transfer(self, kind: Transfer, nbytes: int) -> Callable[[], None] | None:
        """See `Observer.transfer`; None if nobody listens."""
        return None if self.observer is None else self.observer.transfer(kind, nbytes)


_NOTHING: AbstractContextManager[None] = nullcontext()
