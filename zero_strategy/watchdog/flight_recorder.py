"""The flight recorder: numbered collectives of one process group, as this rank begins and ends them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from zero_strategy.watchdog.diagnosis import Begun, DesyncError, Failure, Wait, named, shown

_LONGEST = 250
"""Bytes of a text that is compared."""
_KEPT = 16
"""Of the last collectives: those under way, and what led to them."""

Subject = str | Sequence[str]
"""What a collective is about: in words, or the parameters' names, which become words if somebody asks."""


class TransportError(RuntimeError):
    """A connection broke, or timed out."""


class Waiting(Protocol):
    """Operation that a thread waits in."""

    def wait(self) -> Wait:
        """In words and numbers."""


class CollectiveLogOwner(Protocol):
    """The watchdog that a track reports to; see `Watchdog`."""

    rank: int
    waiting: dict[int, Waiting]
    ended: int
    failure: Failure | None

    @property
    def rank_labels(self) -> Callable[[int], str]: ...

    def explained(self, error: BaseException | None, watched: CollectiveRecord) -> DesyncError: ...

    def fail(self, failure: Failure) -> Failure: ...

    def check(self) -> None: ...

    def progress(self) -> None: ...


class CollectiveRecord:
    """One collective; a context in which this thread waits for its end.

    Attributes:
        track: Whose it is.
        number: Counted from 1.
        work: What can be asked whether it is over, where waiting does not hold the caller (GPUs); None: it is.
    """

    __slots__ = ("number", "thread", "track", "work")

    thread: int

    def __init__(self, track: CollectiveLog, number: int) -> None:
        self.track, self.number = track, number
        self.work: Any = None

    def __enter__(self) -> CollectiveRecord:
        self.thread = threading.get_ident()
        self.track.watchdog.waiting[self.thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watchdog = self.track.watchdog
        watchdog.ended += 1
        if self.work is not None and error is None:
            self.track.waited(self)
        if isinstance(error, TransportError) or (watchdog.failure is not None and not isinstance(error, _PASS)):
            explained = watchdog.explained(error, self)
            watchdog.waiting.pop(self.thread, None)
            raise explained from error
        watchdog.waiting.pop(self.thread, None)

    def wait(self) -> Wait:
        """Operation that is waited in."""
        begun = self.track.begun_at(self.number)
        what = "a collective" if begun is None else named(*begun[:2])
        return Wait(what, self.track.ranks, self.track.key, self.number)

    def text(self) -> str:
        """For `compare`."""
        begun = self.track.begun_at(self.number)
        assert begun is not None
        return f"{self.number} {shown(begun)}".encode()[:_LONGEST].decode(errors="ignore")

    def compare(self, texts: Sequence[str]) -> None:
        """Compare with the other ranks' texts, in the order of their numbers.

        Raises:
            DesyncError: If they differ.
        """
        watchdog, told = self.track.watchdog, dict(zip(self.track.ranks, texts))
        different = [rank for rank, text in told.items() if text != told[watchdog.rank]]
        if different:
            both = sorted((watchdog.rank, different[0]))
            words = ", ".join(f"{watchdog.rank_labels(rank)} begins {told[rank].partition(' ')[2]}" for rank in both)
            watchdog.fail(Failure("different", different[0], f"ranks came to different collectives: {words}", {}))
            watchdog.check()


_PASS = (KeyboardInterrupt, SystemExit)


class CollectiveLog:
    """Collectives of one group of ranks.

    Args:
        watchdog: Whose it is.
        key: Names it; equal on all of its ranks.
        ranks: World ranks that take part.
        compared: The others' of the same number are the same.

    Attributes:
        count: Collectives begun.
    """

    def __init__(self, watchdog: CollectiveLogOwner, key: str, ranks: Sequence[int], compared: bool = True) -> None:
        self.watchdog, self.key, self.ranks, self.compared = watchdog, key, tuple(ranks), compared
        self.count = 0
        self._recent: deque[tuple[int, str, Subject, int, Any]] = deque(maxlen=_KEPT)
        self._works: deque[CollectiveRecord] = deque(maxlen=_KEPT)
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None

    def begin(self, kind: str, of: Subject = "", nbytes: int = 0, dtype: Any = None) -> CollectiveRecord:
        """This rank begins a collective.

        Args:
            kind: Of it.
            of: What it is about.
            nbytes: Of the tensor; the same on all ranks.
            dtype: Likewise.

        Raises:
            DesyncError: If the ranks cannot go on together.
        """
        self.watchdog.check()
        self.count += 1
        self._recent.append((self.count, kind, of, nbytes, dtype))
        return CollectiveRecord(self, self.count)

    def withdraw(self) -> None:
        """The last one did not come about, and will be begun again."""
        self.count -= 1
        self._recent.pop()
        self.watchdog.progress()

    def under_way(self, watched: CollectiveRecord, work: Any, device: torch.device) -> None:
        """A collective that goes on without holding its caller.

        Args:
            watched: The collective.
            work: What torch gave for it; it holds the tensors.
            device: Of them.
        """
        watched.work, self._device = work, device
        self._works.append(watched)

    def waited(self, watched: CollectiveRecord) -> None:
        """The caller has waited for one of these: its tensors are not held for longer, whenever the device is done."""
        if self._device.type != "cuda" or watched.work.is_completed():
            watched.work = None
            return
        # On a stream on which nothing else is, an event comes when the collective is over, whatever is computed.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            watched.work.wait()
            watched.work = _DeviceEnd(self._stream.record_event())

    def oldest_under_way(self) -> CollectiveRecord | None:
        """The first such one that is not over."""
        for watched in list(self._works):
            work = watched.work
            if work is not None and not work.is_completed():
                return watched
        return None

    def recent(self) -> dict[int, Begun]:
        """The last collectives, by number."""
        return {number: _begun(*one) for number, *one in list(self._recent)}

    def begun_at(self, number: int) -> Begun | None:
        """One of them."""
        return self.recent().get(number)


class _DeviceEnd:
    """The end of a collective on a device, without what it was about."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """True if it is over."""
        return bool(self._event.query())


def _begun(kind: str, of: Subject, nbytes: int, dtype: Any) -> Begun:
    return kind, of if isinstance(of, str) else subject(of), nbytes, "" if dtype is None else str(dtype)[6:]


def subject(names: Sequence[str]) -> str:
    """Common name of parameters: the name of their module, else that of the first."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".")[:-1] for name in names]
    common = 0
    while all(len(each) > common and each[common] == parts[0][common] for each in parts):
        common += 1
    return ".".join(parts[0][:common]) or f"{names[0]} and {len(names) - 1} more"
