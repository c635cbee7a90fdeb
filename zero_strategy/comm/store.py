"""Exchanges over the process group's key-value store: a monitored barrier, values of all ranks, the board of a save.

`SaveBoard` has what ranks report to each other during a save. A collective in the middle of a save would hold up
training, or be held up by it, and would wait for a dead rank as long as the process group's timeout. A rank posts that
it has finished a phase, that it is at work, or why it failed; whoever waits sees all three.

`StoreBarrier` is a barrier outside of any collective. A call that only makes sense on all ranks (a gathering
`state_dict`, a save) meets here first. A rank that does not come is named within seconds, where a collective would
block for the process group's timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.meeting import meet
from zero_strategy.comm.store_connection import second_connection
from zero_strategy.runtime.compute_device import gpu_of_group
from zero_strategy.runtime.torch_private import default_store
from zero_strategy.watchdog.flight_recorder import CollectiveLog
from zero_strategy.watchdog.watchdog import Watchdog

_HEARTBEAT_SECONDS = 1.0
_LONGEST_PAUSE = 0.01
_TELL_SECONDS = 5.0
_PATIENCE = 10
"""Times the time-out that a rank may be there and not get on: flushing a page cache takes long, and says nothing."""
_NEIGHBOURS = 8
"""Ranks that each rank watches during a save, beside rank 0."""
_LOOKS = 20_000
"""Messages per second that the store gets from all ranks at a meeting, or from waits in a save, at most."""
_SIGNS = 2 + 3 * (_NEIGHBOURS + 1)
"""Messages in which a rank shows that it is there, and looks whether those are that it watches."""
_REASONS = 8
"""Failed ranks of which the others read why."""
_LIST_SECONDS = 10.0
"""How long a rank that leaves a meeting waits for the first one's list of those that did not come."""
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
        # The store is one thread for all ranks: the more there are, the less often each of them asks it.
        self._beat = max(_HEARTBEAT_SECONDS, min(world_size * _SIGNS / _LOOKS, timeout / 5))
        self._longest_pause = max(_LONGEST_PAUSE, 2 * world_size / _LOOKS)
        self._phases = {"prepared", "written", "committed", "failed"}
        self._lost = lost
        self._sent: dict[str, int] = {}
        self._told = 0.0
        self._lock = threading.Lock()

    def post(self, phase: str) -> None:
        """This rank has finished a phase."""
        self._phases.add(phase)
        if self._store is not None:
            # The own key before the count: whoever sees the count complete finds the key of any rank.
            self._store.set(f"{self._key}/{phase}/{self.rank}", "")
            self._store.add(f"{self._key}/{phase}", 1)

    def count(self, phase: str) -> int:
        """Number of ranks that have finished a phase."""
        self._phases.add(phase)
        # Adding nothing reads a count; `get` would wait for one that nobody has begun.
        return 0 if self._store is None else int(self._store.add(f"{self._key}/{phase}", 0))

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
        # Last, since this is the key that `receive` waits for before it reads the chunks.
        self._store.set(f"{self._key}/{name}/{self.rank}", str(len(chunks)))
        self._sent[name] = len(chunks)

    def receive(self, name: str, rank: int, *, before: str | None = None) -> bytes:
        """The message of another rank, as soon as it has left it.

        Args:
            name: Of the message.
            rank: Who leaves it.
            before: See `wait`.

        Raises:
            FailedElsewhereError: As `wait`.
        """
        self.wait(name, rank, before=before)
        count = int(self._store.get(f"{self._key}/{name}/{rank}"))
        return b"".join(self._store.get(f"{self._key}/{name}/{rank}/{number}") for number in range(count))

    def progress(self, _bytes: int = 0) -> None:
        """This rank gets on; called often, told at most once a second (more rarely among many), by any thread."""
        now = time.monotonic()
        with self._lock:
            due = self._store is not None and now - self._told > self._beat
            if due:
                self._told = now
        if due:
            # Outside of the lock: a message takes a while, and threads that write need not wait for it.
            self._store.add(f"{self._key}/progress/{self.rank}", 1)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Inside, a thread tells now and then that this rank is there, whatever it waits for itself."""
        if self._store is None:
            yield
            return
        over = threading.Event()

        def heartbeat() -> None:
            with contextlib.suppress(Exception):  # the store is gone: who waits here will notice
                while not over.wait(self._beat):
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
            # The reason before the count, which the others look at first.
            self._store.set(f"{self._key}/failed/{self.rank}", reason)
            number = self._store.add(f"{self._key}/failing", 1)
            if number <= _REASONS:
                self._store.set(f"{self._key}/failing/number {number}", str(self.rank))
            self._store.add(f"{self._key}/failed", 1)

    def wait(self, phase: str, rank: int | None = None, *, before: str | None = None) -> None:
        """Returns when a rank, or every rank if None, has finished a phase.

        Args:
            phase: What is finished.
            rank: The rank, or None.
            before: What that rank waits for all ranks to finish before. Among many it watches a few of them, as all do.

        Raises:
            FailedElsewhereError: If a rank has failed, with its reason; or shows no sign of work, naming it.
        """
        if self._store is None:
            return
        watch = _Watch(self._store, self._key, self.timeout, self._beat, self._lost)
        pause, begun, told = 0.0005, time.monotonic(), False
        while not self._finished(phase, rank):
            # A rank that has failed never finishes the phase.
            self.check()
            # The main thread is over and the process seems to hang: its user shall know why.
            if not told and time.monotonic() - begun > _TELL_SECONDS and not threading.main_thread().is_alive():
                told = True
                whom = "other ranks" if rank is None else f"rank {rank}"
                print(f"rank {self.rank}: waiting for {whom} to finish a checkpoint before exit", file=sys.stderr)
            watch.look(self._watched(phase, rank, before))
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest_pause)

    def _watched(self, phase: str, rank: int | None, before: str | None) -> list[tuple[str, int]]:
        """Phases and ranks to watch during a wait."""
        if rank is None:
            return [(phase, other) for other in self._neighbours()]
        # Where rank 0 is a neighbour of all it sees for itself who is lost.
        further = self._neighbours() if before is not None and self.world_size > _NEIGHBOURS + 1 else []
        return [(phase, rank), *((before or phase, other) for other in further if other != rank)]

    def _neighbours(self) -> list[int]:
        """Ranks to watch: a few behind this one, and rank 0. So every rank is watched, and no rank watches many."""
        found = {(self.rank + step) % self.world_size for step in range(1, _NEIGHBOURS + 1)} | {0}
        return sorted(found - {self.rank})

    def check(self) -> None:
        """Raises FailedElsewhereError if another rank has failed."""
        if self.count("failed") == 0:
            return
        # Of the first few: where a save fails on all ranks, each of them would read the reasons of all.
        reasons = {}
        for number in range(1, _REASONS + 1):
            if self._store.check([f"{self._key}/failing/number {number}"]):
                rank = int(self._store.get(f"{self._key}/failing/number {number}"))
                if rank != self.rank:
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
            common = [*self._phases] if self.rank == 0 else []
            if self.rank == 0 and self.count("failed"):
                common += ["failing", *(f"failing/number {number}" for number in range(1, _REASONS + 1))]
            for name in [*local, *common]:
                self._store.delete_key(f"{self._key}/{name}")

    def _finished(self, phase: str, rank: int | None) -> bool:
        if rank is None:
            return self.count(phase) >= self.world_size
        return bool(self._store.check([f"{self._key}/{phase}/{rank}"]))


def own_store(world_size: int) -> Any:
    """A connection to the process group's store that the main thread does not use, for it blocks while it waits.

    It may outlive the process group. None for one rank.
    """
    if world_size == 1:
        return None
    store: Any = default_store()
    try:
        return second_connection(store)
    except (AttributeError, NotImplementedError, RuntimeError):  # not every kind of store can
        return store


class _Watch:
    """Time at which the ranks that are waited for last showed that they are there, and that they get on."""

    def __init__(self, store: Any, key: str, timeout: float, beat: float, lost: Callable[[int], str]) -> None:
        self._store, self._key, self._timeout, self._beat, self._lost = store, key, timeout, beat, lost
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        self._next = 0.0

    def look(self, watched: Sequence[tuple[str, int]]) -> None:
        """See after ranks, if that is due.

        Args:
            watched: Phases, and ranks that are to finish them.

        Raises:
            RankLostError: If one of them never will.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._beat
        for phase, rank in watched:
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


class BarrierError(RuntimeError):
    """Some ranks did not arrive at a call that needs all of them."""


class StoreBarrier:
    """Numbered meeting points over the process group's key-value store.

    Args:
        rank: This rank in the world.
        world_size: Number of ranks that must arrive.
        timeout: Seconds to wait for the last one.
        prefix: Keeps meetings of different engines apart; equal on all ranks.
        store: Carries the messages; default: the process group's store.

    Attributes:
        track: By which a watchdog watches these meetings.
    """

    def __init__(self, rank: int, world_size: int, timeout: float, prefix: str, store: Any = None) -> None:
        self.rank, self.world_size, self.timeout, self.prefix = rank, world_size, timeout, prefix
        self._store = store
        self._round = 0
        self._done: tuple[str, str] | None = None
        self.track: CollectiveLog | None = None

    def guarded(self, watchdog: Watchdog, ranks: Sequence[int]) -> None:
        """Let a watchdog watch these meetings.

        Args:
            watchdog: Of the engine.
            ranks: World ranks that meet.
        """
        if self.world_size > 1 and self.track is None:
            self.track = watchdog.track("meeting", ranks, compared=False)

    def wait_for_all(self, call: str) -> None:
        """Return when all ranks have reached this meeting with the same `call`.

        Raises:
            BarrierError: If a rank has not come in time, or came with another call; names ranks and calls.
            DesyncError: If a rank cannot come, where a watchdog watches.
        """
        if self.world_size == 1:
            return
        with nullcontext() if self.track is None else self.track.begin(call):
            self._meet(call)

    def _meet(self, call: str) -> None:
        store = default_store() if self._store is None else self._store
        self._round += 1
        key = f"zero_strategy/{self.prefix}/{self._round}"
        # `arrived` comes last: whoever completes it finds the call of every rank.
        came = store.add(f"{key}/events", 1)
        store.set(f"{key}/{self.rank}", call)
        store.add(f"{key}/as/{call}", 1)
        if not self._count_in(store, key, call):
            self._await_answer(store, key, call, came)
        if self._done:  # everybody is here, so everybody has left the meeting before
            common = ("events", "arrived", "answer", f"as/{self._done[1]}") if self.rank == 0 else ()
            for name in (str(self.rank), *common):
                store.delete_key(f"{self._done[0]}/{name}")
        self._done = key, call
        if different := json.loads(store.get(f"{key}/answer")):
            raise BarrierError(f"ranks came to different calls: { {int(rank): it for rank, it in different.items()} }")

    def _count_in(self, store: Any, key: str, call: str) -> bool:
        """True if this rank completes the meeting, to which it then leaves the answer."""
        if store.add(f"{key}/arrived", 1) < self.world_size:
            return False
        alike = store.add(f"{key}/as/{call}", 0) == self.world_size
        calls = {} if alike else {rank: store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)}
        store.set(f"{key}/answer", json.dumps(calls))
        return True

    def _await_answer(self, store: Any, key: str, call: str, came: int) -> None:
        """Look for the last rank's answer; one key of the store for each look, however many ranks there are."""
        deadline, pause, longest = time.monotonic() + self.timeout, 0.0005, max(0.05, self.world_size / _LOOKS)
        stayed = False
        while not store.check([f"{key}/answer"]):
            if time.monotonic() > deadline:
                self._withdraw(store, key, call, came, stayed=stayed)
                deadline, stayed = time.monotonic() + self.timeout, True
            if self.track is not None:
                self.track.watchdog.check()  # a failure that is known ends this wait, too
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _withdraw(self, store: Any, key: str, call: str, came: int, *, stayed: bool) -> None:
        """Leave a meeting that did not come about: a rank that comes later shall not believe that this one is here.

        It stays, and this returns, if the last rank has come in this moment.

        Args:
            store, key, call, came: Of the meeting.
            stayed: Whether it has stayed before. A rank that is there, and has not got on since, has died.

        Raises:
            BarrierError: Names the ranks that did not come.
        """
        complete = store.add(f"{key}/arrived", -1) == self.world_size - 1
        # Less does not say that a rank is missing: others that stay may be out of the count, too, at this moment. Their
        # keys are there: a rank sets its own before it counts itself in, and deletes it only when it leaves. So once a
        # meeting is complete nobody finds one missing.
        if complete or (not stayed and store.check([f"{key}/{rank}" for rank in range(self.world_size)])):
            # The last to count itself in again answers, in case a rank came while it was out.
            self._count_in(store, key, call)
            return
        # Before it leaves: whoever looks for absent ranks yet finds this one.
        lists = store.add(f"{key}/leaving", 1) == 1
        absent = None if lists else self._listed(store, key, came)
        if absent is None:
            absent = [rank for rank in range(self.world_size) if not self._was_there(store, key, rank, came)]
        left = store.add(f"{key}/events", 1)
        if lists:
            store.set(f"{key}/absent", json.dumps({"left": left, "ranks": absent}))
        store.add(f"{key}/as/{call}", -1)
        store.set(f"{key}/left/{self.rank}", str(left))
        store.delete_key(f"{key}/{self.rank}")
        # Called once more, this rank comes to the same meeting, where the others will look for it.
        self._round -= 1
        if self.track is not None:
            self.track.withdraw()
        waited = f"{call} needs all {self.world_size} ranks; rank {self.rank} waited {self.timeout:g} s"
        if not absent:  # each was there at some time
            raise BarrierError(f"{waited}, and then as long again for a rank that had come and has died, or left")
        raise BarrierError(
            f"{waited} and rank(s) {absent} did not come. Call it on every rank (not under `if rank == 0`)."
        )

    def _listed(self, store: Any, key: str, came: int) -> list[int] | None:
        """The absent ranks as the first one to leave has found them; one asks the store for all N ranks, not each.

        None if it does not tell, or had left before this rank came: then others are absent.
        """
        deadline, pause = time.monotonic() + _LIST_SECONDS, max(0.02, self.world_size / _LOOKS)
        while not store.check([f"{key}/absent"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
        found = json.loads(store.get(f"{key}/absent"))
        ranks: list[int] = found["ranks"]
        return ranks if found["left"] > came and self.rank not in ranks else None

    @staticmethod
    def _was_there(store: Any, key: str, rank: int, came: int) -> bool:
        """True if a rank is there, or has left since this one came, by the number of that event: it had waited, too."""
        if store.check([f"{key}/{rank}"]):
            return True
        return bool(store.check([f"{key}/left/{rank}"])) and int(store.get(f"{key}/left/{rank}")) > came


def next_number(what: str) -> int:
    """Number things that all ranks make in the same order: 1, 2, ... on every rank, anew in every process group.

    The process group's store counts, for each rank: a count of this process would go on when the group is made
    again, and differ between ranks of which one had been in another group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 1
    store = default_store()
    return int(store.add(f"zero_strategy/{what}/of{dist.get_rank()}", 1))


def check_same_values(name: str, values: Mapping[str, str], *, timeout: float) -> None:
    """Compare named values with those of all other ranks, over the process group's store; needs no group of its own.

    Every rank leaves its values in the store, counts itself in, by a digest of them as well, and reads one answer. The
    last one gives it; it reads the others' values only where they differ.

    Args:
        name: Keeps comparisons apart; equal on all ranks, and used once.
        values: This rank's, in words.
        timeout: Seconds to wait for the slowest rank.

    Raises:
        ValueError: On all ranks, if values differ; names them, and the ranks.
        BarrierError: If a rank has not come in time; names it where rank 0 still answers.
        RankGoneError: If one has died before, in a run that goes on then.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    meet("an engine")
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    prefix, limit = f"zero_strategy/{name}", timedelta(seconds=timeout)
    call = f"the construction of a ZeroEngine needs all {world} ranks"
    text = json.dumps(dict(values))
    alike = f"{prefix}/as/{hashlib.sha256(text.encode()).hexdigest()}"
    store.set(f"{prefix}/{rank}", text)
    store.add(alike, 1)
    # The count of arrivals comes last: whoever completes it finds the values of every rank.
    if store.add(f"{prefix}/arrived", 1) == world:
        differ = store.add(alike, 0) != world
        everyone = [json.loads(store.get(f"{prefix}/{other}")) for other in range(world)] if differ else []
        _answer_first(store, prefix, {"kind": "different", "text": _differences(everyone)})
    try:
        # Rank 0 gives up first, and says whom it has missed; the others wait for that.
        store.wait([f"{prefix}/answer"], limit if rank == 0 else limit + timedelta(seconds=5))
    except dist.DistStoreError:
        if rank != 0:
            raise BarrierError(f"{call}; rank {rank} waited {timeout:g} s, and rank 0 did not come") from None
        absent = [other for other in range(world) if not store.check([f"{prefix}/{other}"])]
        said = f"{call}; rank 0 waited {timeout:g} s, and rank(s) {absent} did not come"
        _answer_first(store, prefix, {"kind": "absent", "text": said})
    problem = json.loads(store.get(f"{prefix}/answer"))
    if problem["kind"] == "absent":  # one that comes yet may still want to read the values
        raise BarrierError(problem["text"])
    store.delete_key(f"{prefix}/{rank}")
    if problem["text"]:
        raise ValueError(f"ranks were given different settings: {problem['text']}. Give all ranks the same")


def _answer_first(store: Any, prefix: str, problem: dict[str, str]) -> None:
    """Leave the answer, unless somebody else does: the last rank may come in the moment in which rank 0 gives up."""
    if store.add(f"{prefix}/answered", 1) == 1:
        store.set(f"{prefix}/answer", json.dumps(problem))


def _differences(everyone: list[dict[str, str]]) -> str:
    found = []
    for key in dict.fromkeys(key for mine in everyone for key in mine):
        ranks: dict[str, list[int]] = {}
        for rank, mine in enumerate(everyone):
            ranks.setdefault(mine.get(key, "absent"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on rank(s) {where}" for value, where in ranks.items())
            found.append(f"{key} is {values}")
    return "; ".join(found)


def all_gather_row(row: Sequence[float]) -> list[list[float]]:
    """Every rank's row, in rank order; one collective of a fixed size, none where there is no process group.

    Args:
        row: As many numbers on every rank; NaN passes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(row)]
    device = gpu_of_group(dist.group.WORLD) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    found: list[list[float]] = torch.stack(rows).tolist()
    return found


def gather_everywhere(value: Any) -> list[Any]:
    """Every rank's picklable value, in rank order, over the default process group; this one's alone without one."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


T = TypeVar("T")


def together(control: Communicator, action: Callable[[], T]) -> T:
    """Run `action` on this rank; if it fails on any rank, raise on all. A collective.

    Args:
        control: The ranks.
        action: What this rank does; without collectives.

    Raises:
        Exception: What `action` raised here.
        RuntimeError: What it raised on other ranks.
    """
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(action())
    except Exception as caught:
        error = caught
    # All take part before anyone raises, or the other ranks would wait here.
    reports = control.all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(reports) if text is not None}
    if failed:
        raise RuntimeError(f"failed on other rank(s): {failed}")
    return found[0]
