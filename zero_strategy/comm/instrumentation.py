"""Watchdog and observer around a transport: every collective is recorded and can be watched.

A watchdog knows every collective from its beginning, and every wait for one; a strict one compares it with the other
ranks' before it runs. An observer hears when bytes begin and end to move, and of waits. The transport knows of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zero_strategy.comm.transport import Run, Scattered, Work, decode_card, encode_card
from zero_strategy.runtime.observer import Observed, Span, Transfer
from zero_strategy.watchdog.flight_recorder import CollectiveLog, CollectiveRecord, Subject, TransportError

_UNWATCHED = nullcontext()


class Instrumentation:
    """A watchdog and an observer of one group's collectives.

    Attributes:
        observed: Who is told what they do.
        track: By which a watchdog watches; None: no watchdog does.
        exchange_card: Brings every rank's card to a strict watchdog, in rank order; None: nothing is compared.
    """

    def __init__(self) -> None:
        self.observed = Observed()
        self.track: CollectiveLog | None = None
        self.exchange_card: Callable[[Tensor], list[Tensor]] | None = None
        self._closed = False

    def close(self) -> None:
        """Nobody looks on any more, and nothing can begin."""
        self._closed = True
        self.track = self.exchange_card = None

    def begin(self, kind: str, of: Subject, tensor: Tensor | Scattered | None = None) -> CollectiveRecord | None:
        """A collective begins; returns how a watchdog knows it.

        Raises:
            DesyncError: If a watchdog knows that the ranks cannot go on together.
            RuntimeError: After `close`.
        """
        if self.track is None:
            if self._closed:
                raise RuntimeError(f"{kind} after the engine was closed; make a new engine")
            return None
        if tensor is None:
            return self.track.begin(kind, of)
        return self.track.begin(kind, of, tensor.nbytes, tensor.dtype)

    def begin_here(self, kind: str, of: Subject, tensor: Tensor | None = None) -> AbstractContextManager[Any]:
        """The same of one that this thread waits for now; gives it as `begin` does, or None."""
        return self.begin(kind, of, tensor) or _UNWATCHED

    def compare(self, watched: CollectiveRecord | None) -> None:
        """Wait until all ranks have told theirs, if a watchdog is strict.

        Raises:
            DesyncError: If they differ.
        """
        if self.exchange_card is not None and watched is not None:
            cards = self.exchange_card(encode_card(watched.text()))
            watched.compare([decode_card(card) for card in cards])

    def around(
        self, run: Run, kind: Transfer, sent: int, watched: CollectiveRecord | None, device: torch.device
    ) -> Run:
        """The job with watchdog and observer around it.

        Args:
            run: The transport's.
            kind: Of the collective.
            sent: Bytes that this rank sends.
            watched: The collective, for a watchdog.
            device: Of its tensors.
        """
        if watched is None and self.observed.observer is None:
            return run

        def seen() -> Work | None:
            if self.exchange_card is not None:
                self.compare(watched)
            ended = self.observed.transfer(kind, sent)
            work = run()
            if work is not None and watched is not None:
                watched.track.under_way(watched, work, device)
            if ended is None:
                return work
            if work is not None:
                return ObservedWork(work, ended)
            ended()
            return None

        return seen

    def pending(
        self,
        kind: Span,
        works: Sequence[Any],
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
    ) -> PendingWork:
        """Works of which the last is of this kind; one before it brings the own slice."""
        return PendingWork(works, self.observed, ("fetch", kind)[2 - len(works) :], watched, then)


class PendingWork:
    """A collective under way. `wait()` may be called any number of times; the first call finishes it.

    Args:
        works: What has to end, in order.
        observed: Who is told of waits.
        kinds: What each of the works is.
        watched: How a watchdog knows it.
        then: Called once, when all has ended.
    """

    def __init__(
        self,
        works: Sequence[Any],
        observed: Observed | None = None,
        kinds: Sequence[Span] = (),
        watched: CollectiveRecord | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._works = list(works)
        self._observed, self._kinds, self._watched, self._then = observed, kinds, watched, then

    def wait(self) -> None:
        """Block until the result is in place (on a GPU: until the current stream will see it).

        Raises:
            DesyncError: If it never will be, where a watchdog watches.
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

    def __init__(self, work: Work, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        """Wait for it."""
        self._work.wait()
        self._ended()

    def is_completed(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()


def _finish(work: Any) -> None:
    if isinstance(work, Future):
        work.result()
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(str(error)) from error
