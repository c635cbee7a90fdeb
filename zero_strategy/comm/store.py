"""The board of one save on the process group's key-value store: what ranks report to each other.

A collective in the middle of a save would hold up training, or be held up by it, and would wait for a dead rank as
long as the process group's time-out. Here a rank posts that it has finished a phase, that it is at work, or why it
failed; whoever waits sees all three.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero_strategy.runtime.torch_private import default_store

_HEARTBEAT_SECONDS = 1.0
_LONGEST_PAUSE = 0.01
_TELL_SECONDS = 5.0
_PATIENCE = 10
"""Times the time-out that a rank may be there and not get on: flushing a page cache takes long, and says nothing."""
_CHUNK_BYTES = 1 << 20
"""Of a message in one value of the store, which refuses values of more than 8 MiB."""


class FailedElsewhereError(RuntimeError):
    """A save failed on another rank."""


class RankLostError(FailedElsewhereError):
    """Another rank shows no sign of work."""


class SaveBoard:
    """The messages of one save, from one rank's point of view.

    Args:
        rank: This rank among those that save.
        world_size: Number of ranks that save.
        timeout: Seconds that another rank may go without any sign of work.
        key: Keeps saves apart; equal on all ranks.
        store: What carries the messages; default: the process group's store.
        earlier: Of a save that all ranks have left.
        lost: Why a rank cannot go on, "" for one of which nothing is known; asked now and then of those waited for.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        key: str,
        store: Any = None,
        *,
        earlier: SaveBoard | None = None,
        lost: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._earlier = earlier
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._key = f"zero_strategy/save/{key}"
        self._store: Any = store if store is not None or world_size == 1 else own_store(world_size)
        self._phases = {"prepared", "written", "committed", "failed"}
        self._lost = lost
        self._sent: dict[str, int] = {}
        self._told = 0.0
        self._lock = threading.Lock()

    def post(self, phase: str) -> None:
        """This rank has finished a phase."""
        self._phases.add(phase)
        if self._store is not None:
            self._store.set(f"{self._key}/{phase}/{self.rank}", "")
            self._store.add(f"{self._key}/{phase}", 1)

    def posted(self, phase: str, rank: int) -> bool:
        """True if a rank is known to have finished a phase."""
        return self._store is not None and bool(self._store.check([f"{self._key}/{phase}/{rank}"]))

    def send(self, name: str, content: bytes) -> None:
        """Leave a message, for whoever asks `receive` for it."""
        if self._store is None:
            return
        chunks = range(0, len(content), _CHUNK_BYTES)
        for number, begin in enumerate(chunks):
            self._store.set(f"{self._key}/{name}/{self.rank}/{number}", content[begin : begin + _CHUNK_BYTES])
        self._store.set(f"{self._key}/{name}/{self.rank}", str(len(chunks)))
        self._sent[name] = len(chunks)

    def receive(self, name: str, rank: int) -> bytes:
        """The message of another rank, as soon as it has left it.

        Raises:
            FailedElsewhereError: As `wait`.
        """
        self.wait(name, rank)
        count = int(self._store.get(f"{self._key}/{name}/{rank}"))
        return b"".join(self._store.get(f"{self._key}/{name}/{rank}/{number}") for number in range(count))

    def progress(self, _bytes: int = 0) -> None:
        """This rank gets on; called often, told at most once a second, by any thread."""
        now = time.monotonic()
        with self._lock:
            due = self._store is not None and now - self._told > _HEARTBEAT_SECONDS
            if due:
                self._told = now
        if due:
            self._store.add(f"{self._key}/progress/{self.rank}", 1)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Inside, a thread tells every second that this rank is there, whatever it waits for itself."""
        if self._store is None:
            yield
            return
        over = threading.Event()

        def heartbeat() -> None:
            with contextlib.suppress(Exception):  # the store is gone: who waits here will notice
                while not over.wait(_HEARTBEAT_SECONDS):
                    self._store.add(f"{self._key}/alive/{self.rank}", 1)

        thread = threading.Thread(target=heartbeat, name="checkpoint-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def fail(self, reason: str) -> None:
        """This rank has failed."""
        if self._store is not None:
            self._store.set(f"{self._key}/failed/{self.rank}", reason)
            self._store.add(f"{self._key}/failed", 1)

    def wait(self, phase: str, rank: int | None = None) -> None:
        """Returns when a rank, or every rank if None, has finished a phase.

        Raises:
            FailedElsewhereError: If a rank has failed, with its reason; or shows no sign of work, naming it.
        """
        if self._store is None:
            return
        watch = _Watch(self._store, self._key, self.timeout, self._lost)
        pause, begun, told = 0.0005, time.monotonic(), False
        while not self._finished(phase, rank):
            self.check()
            if not told and time.monotonic() - begun > _TELL_SECONDS and not threading.main_thread().is_alive():
                told = True
                whom = "other ranks" if rank is None else f"rank {rank}"
                print(f"rank {self.rank}: waiting for {whom} to finish a checkpoint before exit", file=sys.stderr)
            watch.look(phase, [rank] if rank is not None else list(range(self.world_size)), self.rank)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def check(self) -> None:
        """Raises FailedElsewhereError if another rank has failed."""
        if self._store is None or self._store.add(f"{self._key}/failed", 0) == 0:
            return
        reasons = {}
        for rank in range(self.world_size):
            if rank != self.rank and self._store.check([f"{self._key}/failed/{rank}"]):
                reasons[rank] = self._store.get(f"{self._key}/failed/{rank}").decode()
        if reasons:
            raise FailedElsewhereError(f"failed on other rank(s): {reasons}")

    def clear_earlier(self) -> None:
        """Removes this rank's messages of earlier saves; not in `__init__`, for training waits for that."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.clear_earlier()  # of a save that never began
            earlier.clear()

    def clear(self) -> None:
        """Removes this rank's messages; for when all ranks are known to have left the save."""
        if self._store is not None:
            local = [f"{name}/{self.rank}" for name in ["alive", "progress", *self._phases, *self._sent]]
            local += [f"{name}/{self.rank}/{number}" for name, count in self._sent.items() for number in range(count)]
            for name in [*local, *(self._phases if self.rank == 0 else ())]:
                self._store.delete_key(f"{self._key}/{name}")

    def _finished(self, phase: str, rank: int | None) -> bool:
        if rank is None:
            return bool(self._store.add(f"{self._key}/{phase}", 0) >= self.world_size)
        return bool(self._store.check([f"{self._key}/{phase}/{rank}"]))


def own_store(world_size: int) -> Any:
    """A connection to the process group's store that the main thread does not use, for it blocks while it waits.

    It may outlive the process group. None for one rank.
    """
    if world_size == 1:
        return None
    store: Any = default_store()
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # not every kind of store can
        return store


class _Watch:
    """Time at which the ranks that are waited for last showed that they are there, and that they get on."""

    def __init__(self, store: Any, key: str, timeout: float, lost: Callable[[int], str]) -> None:
        self._store, self._key, self._timeout, self._lost = store, key, timeout, lost
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        self._next = 0.0

    def look(self, phase: str, ranks: list[int], local: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _HEARTBEAT_SECONDS
        for rank in ranks:
            if rank == local:
                continue
            lost = self._lost(rank)  # before the next line: a rank may have finished and then ended
            if self._store.check([f"{self._key}/{phase}/{rank}"]):
                continue
            if lost:
                raise RankLostError(f"rank {rank} has not {phase} its part of the checkpoint: {lost}")
            for sign, patience, meaning in (("alive", 1, "it has died"), ("progress", _PATIENCE, "its disk hangs")):
                if self._silent(sign, rank, now) > patience * self._timeout:
                    raise RankLostError(
                        f"rank {rank} has not {phase} its part of the checkpoint and has shown no sign of {sign} for "
                        f"{patience * self._timeout:g} s (checkpoint.timeout_seconds is {self._timeout:g}): {meaning}"
                    )

    def _silent(self, sign: str, rank: int, now: float) -> float:
        """Seconds since a rank's counter moved."""
        count = self._store.add(f"{self._key}/{sign}/{rank}", 0)
        before, since = self._seen.get((sign, rank), (-1, now))
        self._seen[sign, rank] = (count, since if count == before else now)
        return now - self._seen[sign, rank][1]
