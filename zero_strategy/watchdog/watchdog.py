"""The watchdog of one engine: no rank waits for ever for one that has failed, is gone, or does something else.

Collectives are numbered as they begin (`flight_recorder`), and that is all while they are quick. A thread (`Watch`)
notices when nothing has moved for some seconds. Then ranks tell each other where they are, through the key-value store,
and look at each other's processes (`peers`); what follows is decided by pure functions (`diagnosis`). A rank that is
merely late is waited for. Where there is no hope, the failure is posted and connections are broken, so that every wait
ends in the same `DesyncError`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from zero_strategy.runtime.worker import Watch
from zero_strategy.watchdog.diagnosis import (
    DesyncError,
    Failure,
    RankLabels,
    Report,
    Wait,
    find_failure,
    listed,
    positions,
    rank_label,
)
from zero_strategy.watchdog.flight_recorder import (
    CallSite,
    CollectiveLog,
    CollectiveRecord,
    Foreign,
    Stacks,
    Waiting,
    as_text,
    call_site_of,
    call_site_of_error,
    phases,
    stacks,
)
from zero_strategy.watchdog.peers import Heartbeats, ProcessCard, StoreClient, condition

EXIT_CODE = 71
"""Of a process that the watchdog ends, since it waits in a collective of somebody else that cannot end."""
_LOOKS = 3
"""Of a wait before ranks compare."""
_REASON_SECONDS = 1.0
"""How long a broken connection waits for its reason, which is posted before, and for a process to be gone."""
_FOREIGN_SECONDS = 1.0
"""How long a collective of somebody else may go on after a failure: mostly it ends by itself."""
_READERS = 16
"""Ranks that read the reports of all at a time."""
_TURN = 6
"""Reports of its own that a rank's turn to read takes: enough to suspect and to confirm."""
_MANY = 64
"""Reports that are read at once to explain a broken connection."""
_FLUSH_SECONDS = 1.0
_RARELY = 3.0
"""Seconds between looks where nothing has moved for long, and nobody waits: this engine is not in use."""
_TELL_AFTER = 10
"""Times `wait_seconds` before a rank says for whom it waits."""

_ENDED = "its process has ended (killed, out of memory, or done before the others)"

_logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the collectives of one engine on one rank.

    The watch's thread holds this while it looks. So nothing here leads to the engine, its communicators or groups: one
    that is dropped meanwhile goes all the same.

    Args:
        rank: This one, in the world.
        cards: All ranks' processes.
        connect: Makes a connection to the key-value store.
        key: Keeps engines apart; equal on all ranks.
        wait_seconds: Without any progress, after which ranks tell each other where they are.
        silence_seconds: That a rank may be stopped, or be away after an exception, before the others give it up.
        unheard_seconds: That a rank of another host may not be heard of while it is waited for.
        strict: Compare each collective with the other ranks' before it.
        rank_labels: Ranks in words.

    Attributes:
        failure: Why these ranks cannot go on.
        waiting: What threads wait in.
        ended: Waits that are over.
        watch: The thread.
    """

    def __init__(
        self,
        rank: int,
        cards: Sequence[ProcessCard],
        connect: Callable[[], Any],
        key: str,
        *,
        wait_seconds: float,
        silence_seconds: float,
        unheard_seconds: float = math.inf,
        strict: bool = False,
        rank_labels: RankLabels = rank_label,
    ) -> None:
        # Every rank is there now: one that cannot be seen (another user's, on systems that hide those) is no evidence.
        self._cards = [card._replace(host="") if condition(card) == "gone" else card for card in cards]
        self.rank, self.strict = rank, strict
        self._wait, self._silence = wait_seconds, silence_seconds
        self.failure: Failure | None = None
        self.waiting: dict[int, Waiting] = {}
        self.ended = 0
        self.rank_labels = rank_labels
        self._unfinished: list[weakref.WeakMethod[Callable[[Collection[str]], str]]] = []
        self._tracks: list[weakref.ref[CollectiveLog]] = []
        self._breaks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._note, self._note_at = "", -1
        self._lock = threading.Lock()
        self._store_client = StoreClient(connect, key)
        far = [number for number, card in enumerate(self._cards) if condition(card) == "unknown"]
        # On one host every rank looks at the processes itself: nobody needs to be told of them.
        self._near = [number for number in range(len(cards)) if number not in far and number != rank] if far else []
        self._heartbeats = Heartbeats(rank, far, self._store_client, seconds=unheard_seconds, shortest=wait_seconds)
        self._interval = wait_seconds / _LOOKS
        self._seen, self._since, self._looked = -1, time.monotonic(), time.monotonic()
        self._asked = self._interval
        self._beat, self._next_report, self._warned = 0, 0.0, False
        self._stopped_since: dict[int, float] = {}
        self._foreign: tuple[Foreign | None, float] = (None, 0.0)
        self._partially_applied, self._ended = "", False
        self._told = False
        self._suspected: tuple[int, str, dict[int, int]] = (-1, "", {})
        self.watch = Watch()
        # After all that a look reads: the first one comes at once.
        self.watch.start(self)
        # It does not hold this object, which atexit would keep for the life of the process.
        self._at_exit = partial(_tell_exit, rank, self._store_client, os.getpid())
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit).atexit = False

    def _left_unfinished(self, phases: Collection[str]) -> str:
        for reference in self._unfinished:
            says = reference()
            text = "" if says is None else says(phases)
            if text:
                return text
        return ""

    # ---- what ranks do ----

    def track(
        self,
        name: str,
        ranks: Sequence[int],
        on_failure: Callable[[], None] | None = None,
        *,
        compared: bool = True,
    ) -> CollectiveLog:
        """Number the collectives of some ranks.

        Args:
            name: Tells tracks of the same ranks apart; equal on all of them.
            ranks: World ranks.
            on_failure: See `add_break`.
            compared: Different ones of the same number are a failure. Not where one may be given up (`withdraw`).
        """
        track = CollectiveLog(self, f"{name} {_key_of(ranks)}", ranks, compared)
        self._tracks.append(weakref.ref(track))
        if on_failure is not None:
            self.add_break(on_failure)
        return track

    def add_break(self, on_failure: Callable[[], None]) -> None:
        """Call this when ranks cannot go on; it ends waits. A method, whose object is held weakly."""
        self._breaks.append(weakref.WeakMethod(on_failure))
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)  # the last is the first: the reason is told before any connection breaks

    def add_unfinished(self, says: Callable[[Collection[str]], str]) -> None:
        """Ask this what an exception has left unfinished on this rank.

        Args:
            says: Gets the parts of a step that this rank's threads are in, and answers in words; "": nothing. A method,
                whose object is held weakly; called in the watch's thread.
        """
        self._unfinished.append(weakref.WeakMethod(says))

    @property
    def tracks(self) -> list[CollectiveLog]:
        """Operations with numbers, as far as somebody uses it."""
        return [track for reference in self._tracks if (track := reference()) is not None]

    def check(self) -> None:
        """Raise if the ranks cannot go on.

        Raises:
            DesyncError: With what all ranks were told.
        """
        if self.failure is not None:
            self.told()
            raise DesyncError(self.failure.text, self.failure)

    def connect(self) -> None:
        """Connect to the store now, and not when there is something to tell; see `StoreClient.open`."""
        self._store_client.open()

    def told(self) -> None:
        """This rank raises what it was told: it knows."""
        self._told = True

    def progress(self) -> None:
        """This rank gets on, in whatever way."""
        self.ended += 1

    def note(self, text: str, *, ended: bool = False) -> None:
        """Something has befallen this rank, which the others should know if it comes to no collective any more.

        Args:
            text: What.
            ended: It is known not to.
        """
        self._note, self._note_at, self._ended = text, self._events(), ended
        self._store_client.tell(self._report(call_site_of(None), None, 0.0))
        self.watch.poke()

    def note_error(self, error: BaseException, *, ended: bool = False) -> None:
        """Note an exception on its way out of training; one that the watchdog has raised is known."""
        if self.failure is None and not isinstance(error, DesyncError):
            self.note(_said(error), ended=ended)

    def fail(self, failure: Failure) -> Failure:
        """The ranks cannot go on: tell them, and break this rank's connections.

        Returns:
            The failure that came first, which may be another one.
        """
        with self._lock:
            if self.failure is None:
                # Posted before any connection breaks: whoever's wait ends by that looks for the reason.
                self.failure = self._store_client.post(failure)
                for reference in self._breaks:
                    if (end := reference()) is not None:
                        # A connection that cannot be broken must not spare the others.
                        with contextlib.suppress(Exception):
                            end()
        self.watch.poke()
        return self.failure

    def explained(self, error: BaseException | None, watched: CollectiveRecord) -> DesyncError:
        """Error to raise where a collective has failed."""
        if self.failure is None:
            # A process posts its reason before it ends.
            found = self._store_client.first(_REASON_SECONDS, partial(self._any_gone, watched.track.ranks))
            found = self.fail(found or self._cause(error, watched))
        else:
            found = self.failure
        self.told()
        return DesyncError(found.text, found)

    def close(self) -> None:
        """No more looks."""
        atexit.unregister(self._at_exit)
        self.watch.stop()
        self._store_client.close()
        self._breaks.clear()

    def lost(self, rank: int) -> str:
        """Why a rank cannot go on, as far as is known here; "": nothing is known. Any thread may ask."""
        failure = self.failure
        if failure is not None and failure.rank == rank and failure.kind in ("gone", "silent"):
            return failure.text
        return _ENDED if condition(self._cards[rank]) == "gone" else ""

    def _any_gone(self, ranks: Sequence[int]) -> bool:
        return any(condition(self._cards[rank]) == "gone" for rank in self._peers(ranks))

    def _cause(self, error: BaseException | None, watched: CollectiveRecord) -> Failure:
        own = self._report(call_site_of(watched.thread), watched.wait(), 0.0)
        end, gone = time.monotonic() + _REASON_SECONDS, list[int]()
        # Should one of them be gone, `_gone` tells by its report what it had noted last.
        self._store_client.exchange(None, fetch=self._peers(watched.track.ranks)[:_MANY])
        while not gone and time.monotonic() < end:
            time.sleep(0.05)
            gone = [rank for rank in self._peers(watched.track.ranks) if condition(self._cards[rank]) == "gone"]
        if gone:
            return self._gone(gone, own)
        others = self._peers(watched.track.ranks)
        text = (
            f"a connection to {listed(others, self.rank_labels)} broke: {positions([own], self.rank_labels)} ({error})"
        )
        return Failure("gone", others[0], text, {})

    def _gone(self, ranks: list[int], own: Report) -> Failure:
        notes = [report.note for report in self._store_client.reports(0.0)[0] if report.rank in ranks and report.note]
        why = notes[0] if notes else _ENDED
        text = f"{listed(ranks, self.rank_labels)} {'is' if len(ranks) == 1 else 'are'} gone: {why}; "
        return Failure("gone", ranks[0], text + positions([own], self.rank_labels), {})

    # ---- what the watch does ----

    def look(self) -> float:
        """See `Looker`."""
        now = time.monotonic()
        late, self._looked = now - self._looked - self._asked, now
        # Heartbeats are told by looks, so these come often enough for them.
        self._asked = min(self._look(now, late), self._heartbeats.interval)
        if self.failure is None:
            self._heartbeats.tell(now)
        return self._asked

    def _look(self, now: float, late: float) -> float:
        events = self._events()
        if self.failure is not None:
            self._end_foreign(now)
            return self._interval
        if events != self._seen or late > max(2.0, 4 * self._interval):  # or this process was stopped itself
            # This rank got on after all: the others must not go on believing its note.
            if self._note and events != self._note_at:
                self._note = ""
                self._store_client.exchange(self._report(CallSite("", "", None), None, 0.0))
            self._seen, self._since, self._next_report, self._warned = events, now, self._wait, False
            self._stopped_since.clear()
            self._heartbeats.forget()
            self._foreign, self._partially_applied = (None, 0.0), ""
            return self._interval
        if (idle := now - self._since) >= self._wait or self._note:
            waits = self._alert(now, idle)
            # Often while ranks wait for each other; more and more rarely where nothing moves and nobody waits.
            return self._interval / 2 if waits else min(max(self._interval / 2, idle / 8), max(self._interval, _RARELY))
        return self._interval

    def _alert(self, now: float, idle: float) -> bool:
        """Nothing has moved for long: tell the others, and find out about them.

        Returns:
            Whether this rank waits for others, or they may for it.
        """
        if (known := self._store_client.known) is not None:
            self.fail(known)
            return True
        # Once for all that follows, so that wait, place and phase are of one moment.
        now_in = stacks()
        wait, thread = self._wait_now(now, now_in)
        site = call_site_of(thread, now_in)
        partially_applied, self._partially_applied = (
            self._partially_applied,
            "" if self._note else self._left_unfinished(phases(now_in)),
        )
        if (
            self._partially_applied and self._partially_applied == partially_applied
        ):  # twice: what is asked is not of one moment
            self._note, self._note_at = partially_applied, self._events()
        report = self._report(site, wait, idle)
        if wait is None and not self._note:
            if idle >= self._next_report:  # who is busy elsewhere says so now and then, should somebody wait
                self._next_report = 2 * idle
                if "gone" not in map(condition, self._cards):  # else the store may be gone, too
                    self._store_client.exchange(report)
            return bool(self._foreign[0] or self._partially_applied)
        read = [] if wait is None else self._to_read(wait, report.beat)
        self._store_client.exchange(report, fetch=read, listen=self._heartbeats.listen(read))
        if wait is not None:
            found = self._evidence(report, wait, now) or self._confirmed(report)
            if found is not None:
                self.fail(found)
            elif idle > _TELL_AFTER * self._wait and not self._warned:
                self._warned = True
                others, _ = self._store_client.reports(0.0)
                where = positions([report, *(each for each in others if each.rank in wait.ranks)], self.rank_labels)
                _logger.warning("no progress for %.0f s, and no rank is known to have failed: %s", idle, where)
        return True

    def _evidence(self, own: Report, wait: Wait, now: float) -> Failure | None:
        """Signs of the processes of this host, and the silence of those of others."""
        gone = []
        for rank in self._peers(wait.ranks):
            state = condition(self._cards[rank])
            if state == "gone":
                gone.append(rank)
            elif state != "stopped":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= self._silence:
                text = (
                    f"{self.rank_labels(rank)} is stopped: its process has not run for {self._silence:g} s (SIGSTOP); "
                    f"{positions([own], self.rank_labels)}"
                )
                return Failure("stopped", rank, text, {})
        if gone:
            return self._gone(gone, own)
        # Ranks that wait report every half interval, so an older report may not hold any more.
        others, fresh = self._store_client.reports(4 * self._interval + 1.0)
        now_there = [report for report in others if report.rank in fresh]
        return self._heartbeats.silent(self._peers(wait.ranks), own, now_there, self.rank_labels)

    def _confirmed(self, own: Report) -> Failure | None:
        """Finding of the reports, if they say it twice; that ranks wait for each other, if they do in later reports."""
        others, fresh = self._store_client.reports(4 * self._interval + 1.0)
        found = find_failure(own, others, fresh=fresh, silence=self._silence, rank_labels=self.rank_labels)
        if found is None:
            self._suspected = -1, "", {}
            return None
        events, kind, beats = self._suspected
        if (events, kind) != (own.events, found.kind):
            self._suspected = own.events, found.kind, {report.rank: report.beat for report in others}
            return None
        if kind != "locked":
            return found
        # One that is long out of what it waited in may be unable to say so: a single call may keep the GIL.
        later = {report.rank for report in others if report.rank in fresh and report.beat > beats.get(report.rank, -1)}
        found = find_failure(own, others, fresh=later, silence=self._silence, rank_labels=self.rank_labels)
        return found if found is not None and found.kind == kind else None

    def _to_read(self, wait: Wait, beat: int) -> list[int]:
        """Ranks whose reports this rank reads now: those that it waits for if they are few, those of all in its turn.

        Whoever is stuck finds the same, and one is enough to tell all; the store is one thread.
        """
        turns = -(-len(self._cards) // _READERS)
        if (beat // _TURN + self.rank) % turns == 0:
            return self._peers(range(len(self._cards)))
        awaited = self._peers(wait.ranks)
        return awaited if len(awaited) <= _READERS else []

    def _wait_now(self, now: float, found: Stacks) -> tuple[Wait | None, int | None]:
        """Operation that this rank waits in, and the thread that does."""
        for thread, waiting in list(self.waiting.items()):  # a copy, as threads begin and end waits meanwhile
            return waiting.wait(), thread
        for track in self.tracks:
            if (watched := track.oldest_under_way()) is not None:
                return watched.wait(), None
        foreign = call_site_of(None, found).foreign
        if foreign is None:
            self._foreign = None, 0.0
        if foreign is None or self._foreign_seconds(foreign, now) < self._wait:
            return None, None
        what = f"torch.distributed.{foreign.name}"
        return Wait(what, foreign.awaited, message=foreign.message, group=foreign.ranks), None

    def _foreign_seconds(self, foreign: Foreign, now: float) -> float:
        """Since when the main thread is known to be in this call."""
        if self._foreign[0] is None or self._foreign[0].call != foreign.call:
            self._foreign = foreign, now
        return now - self._foreign[1]

    def _end_foreign(self, now: float) -> None:
        """End the process if it waits in a collective that we cannot break, with ranks that do not come any more.

        Not where this rank knows of the failure: it may well meet the others to begin anew.
        """
        assert self.failure is not None
        if self._told or (self.failure.rank == self.rank and self.failure.kind == "raised"):
            return
        foreign = None if self.waiting else call_site_of(None).foreign
        if foreign is not None and self._foreign_seconds(foreign, now) > _FOREIGN_SECONDS:
            stack = as_text(stacks().get(threading.main_thread().ident or 0, []))
            sys.stderr.write(
                f"{stack}DesyncError: {self.failure.text}\n{self.rank_labels(self.rank)} waits in torch.distributed."
                f"{foreign.name}, which cannot end: the process ends with exit code {EXIT_CODE}\n"
            )
            sys.stderr.flush()
            flush = threading.Thread(target=sys.stdout.flush, daemon=True)
            flush.start()
            flush.join(_FLUSH_SECONDS)  # nobody may read it any more
            # `sys.exit` would end this thread only: the main one is inside of a call of torch's.
            os._exit(EXIT_CODE)

    def _report(self, site: CallSite, wait: Wait | None, idle: float) -> Report:
        self._beat += 1
        return Report(
            self.rank,
            self._beat,
            self._events(),
            idle,
            str(site),
            wait,
            self._note,
            self._ended and bool(self._note),
            counts={track.key: track.count for track in self.tracks},
            recent={track.key: track.recent() for track in self.tracks if track.compared},
            sees=tuple(rank for rank in self._near if condition(self._cards[rank]) == "running"),
        )

    def _events(self) -> int:
        return self.ended + sum(track.count for track in self.tracks)

    def _peers(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]


def _key_of(ranks: Sequence[int]) -> str:
    """Ranks, by a name that is equal on all of them; short, as it is in every report."""
    text = "-".join(map(str, ranks))
    return text if len(ranks) <= _READERS else f"{len(ranks)} ranks {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _said(error: BaseException) -> str:
    site = call_site_of_error(error)
    return f"raised {type(error).__name__}: {error}" + (f" ({site})" if str(site) else "")


def _tell_exit(rank: int, store_client: StoreClient, pid: int) -> None:
    """Tell, at exit: an exception that has ended the process is the last thing that the others hear of it."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, DesyncError) and os.getpid() == pid:  # not in a fork of it
        with contextlib.suppress(Exception):
            store_client.post(Failure("raised", rank, f"rank {rank} {_said(error)}, and has ended", {}))
