"""A collective under way, and how its end is waited for: whoever observes is told, and a guard watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from zero_strategy.distributed.tracks import TransportError, Watched
from zero_strategy.runtime.observing import Observed, Span


class PendingWork:
    """A collective under way. `wait()` may be called any number of times; the first call finishes it.

    Args:
        works: What has to end, in order.
        observed: Who is told of waits.
        kinds: What each of the works is.
        watched: How a guard knows it.
        then: Called once, when all has ended.
    """

    def __init__(
        self,
        works: Sequence[Any],
        observed: Observed | None = None,
        kinds: Sequence[Span] = (),
        watched: Watched | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._works = list(works)
        self._observed, self._kinds, self._watched, self._then = observed, kinds, watched, then

    def wait(self) -> None:
        """Block until the result is in place (on a GPU: until the current stream will see it).

        Raises:
            DesyncError: If it never will be, where a guard watches.
        """
        works, self._works = self._works, []
        if self._watched is None or not works:
            self._finish(works)
        else:
            with self._watched:
                self._finish(works)
        then, self._then = self._then, None
        if then is not None:
            then()

    def _finish(self, works: list[Any]) -> None:
        if self._observed is None or self._observed.observer is None:
            for work in works:
                _finish(work)
            return
        for kind, work in zip(self._kinds, works, strict=True):
            with self._observed.span(kind):
                _finish(work)


class ObservedWork:
    """Work of a device's own, whose end is when somebody waits for it.

    Args:
        work: Of the device.
        ended: Called then.
    """

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        """Wait for it."""
        self._work.wait()
        self._ended()


def _finish(work: Any) -> None:
    if isinstance(work, Future):
        work.result()
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(str(error)) from error


@contextmanager
def transport() -> Iterator[None]:
    """Inside, every RuntimeError is one of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error)) from error
