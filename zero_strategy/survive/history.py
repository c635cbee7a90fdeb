"""The history of a run: its beginnings, the stalls before them, and its goodput.

    copies        1    2    3              4    5      6         steps of the run
    time         10   11   12      14   15.5 16.5     18
    beginnings                      ^ a rank has died    ^ its place is taken again
    stalls                 |-------------|    |-------|          3.5 s and 1.5 s of the 8 s: goodput 3/8

A stall goes from the end of the last copy to that of the first one of the new beginning. The new copy's own step lies
within it, so that a stall is never shorter than a step, and goodput is a lower bound.

Who is left has the history in memory, and the ranks of a new world agree on the newest when they meet (`formation`).
It lies in each copy, too, for a run of which all processes have died. Times are those of the clock of the host that
noted them: between hosts they are as good as their clocks are set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from typing_extensions import Self

OF_GROUPS = ("gloo/", "Connection closed by peer", "Connection reset")
"""Parts of the errors of groups whose members are gone, or have left."""
_AT_SECOND_HAND = " has left: "
_ALL_ENDED = "all processes of before had ended"


class Left(NamedTuple):
    """Why a rank has left the training function.

    Attributes:
        why: The first line of the error.
        torn: The step at hand was left unfinished; False: it had ended.
    """

    why: str
    torn: bool


@dataclass(frozen=True)
class Beginning:
    """One call of the training function, on ranks that have formed.

    Attributes:
        number: From 1.
        time: When its ranks had formed, in seconds since 1970.
        step: The step of the last copy before.
        why: The first line of the error that ended the beginning before; "": it is the first one.
        before, after: Numbers of ranks; `before` is 0 in the first one of a run.
        went, came: Places of processes that are held for dead, and of new ones; a place may be in both.
        waiting: Processes that are there and do not fit, as ranks divide the slots.
        since: End of the last copy before, or the beginning before where that came to none.
        stall: Seconds from there to the end of this one's first copy, or to the next beginning where it came to none.
        lost: Seconds from there until the run was as far as before: more than the stall where steps since an older
            checkpoint had to be done again.
        again: Steps that were computed again, that at hand included. Those of beginnings which came to no copy count
            with the next one.
    """

    number: int
    time: float
    step: int
    why: str
    before: int
    after: int
    went: Sequence[int]
    came: Sequence[int]
    waiting: int
    since: float
    stall: float | None = None
    lost: float = 0.0
    again: int = 0

    @property
    def first(self) -> bool:
        """True for the one with which the processes started."""
        return not self.before

    def to_json(self) -> dict[str, Any]:
        """Plain types; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The beginning of a line.

        Raises:
            KeyError, TypeError, ValueError: If it is none.
        """
        stall = values["stall"]
        kept = {**values, "why": str(values["why"]), "stall": None if stall is None else float(stall)}
        kept |= {name: float(values[name]) for name in ("time", "since", "lost")}
        kept |= {name: [int(place) for place in values[name]] for name in ("went", "came")}
        return cls(**kept)


@dataclass
class History:
    """Beginnings of one run so far, as each of its ranks knows them.

    Attributes:
        number: Of the last beginning; 0: there was none.
        ranks: Of it.
        names: Members that were there, those that waited included.
        started: From when on time counts: the end of the first copy, or the first beginning where ranks have died
            before there was a copy; None: there is no copy.
        mark: End of the last copy; the last beginning where that came to none.
        step: Of the last copy.
        furthest: The last step of all copies.
        complete: The last copy was the end of its step.
        reached: The last step that was begun before the last beginning.
        back: The step that the last beginning has gone back to; None: not to a copy.
        deaths: Processes that were held for dead.
        lost: Seconds of the beginnings that are over.
        open: The last beginning, until the run is as far as before.
        unwritten: Beginnings that are over, and not told yet.
    """

    number: int = 0
    ranks: int = 0
    names: list[str] = field(default_factory=list)
    started: float | None = None
    mark: float = 0.0
    step: int = 0
    furthest: int = 0
    complete: bool = True
    reached: int = 0
    back: int | None = None
    deaths: int = 0
    lost: float = 0.0
    open: Beginning | None = None
    unwritten: list[Beginning] = field(default_factory=list)

    # ---- what happens ----

    def begin(self, now: float, ranks: int, names: Sequence[str], left: Left) -> None:
        """Note that ranks have formed.

        Args:
            now: Seconds since 1970.
            ranks: How many.
            names: Members that are there, those that wait included.
            left: Why the beginning before has ended.
        """
        first, chained = not self.number, self.open is not None and self.open.stall is None
        self._end_last(now)
        if first:
            self.mark = now
        begun = self.step + (left.torn and self.complete)
        self.reached, self.back = max(begun, self.reached if chained else 0), None
        went, came = _places(set(self.names) - set(names)), _places(set(names) - set(self.names))
        self.number += 1
        self.deaths += len(went)
        self.open = Beginning(
            self.number, now, self.step, "" if first else left.why, self.ranks, ranks, went, came, len(names) - ranks,
            self.mark,
        )  # fmt: skip
        self.ranks, self.names = ranks, list(names)

    def _end_last(self, now: float) -> None:
        """End the last beginning, which the next one follows."""
        last, self.open = self.open, None
        if last is None:
            return
        if self.started is None:
            self.started = self.mark
        if last.first:
            last = replace(last, since=self.started, stall=0.0)
        elif last.stall is None:
            # A copy that tells of its own run has come after the beginning, and does not know that.
            self.mark = self.mark if self.mark > last.time else max(now, last.since)  # another host's clock
            last = replace(last, stall=self.mark - last.since, lost=self.mark - last.since)
        else:
            last = replace(last, lost=max(0.0, self.mark - last.since))
        self.lost += last.lost
        self.unwritten.append(last)

    def went_back(self, step: int) -> None:
        """Note the step of the copy that is loaded."""
        self.back = step

    def copied(self, step: int, now: float, *, complete: bool = True) -> list[Beginning]:
        """Note the end of a copy.

        Args:
            step: Steps taken with it.
            now: Seconds since 1970.
            complete: It is the end of its step; False: something that belongs to it follows, and another copy.

        Returns:
            Beginnings to be written down; of two with one time the later one counts.
        """
        self.complete = complete or self.started is None
        self.started = now if self.started is None else self.started
        self.mark, self.step, self.furthest = now, step, max(self.furthest, step)
        if self.open is None:
            return []
        told, self.unwritten = self.unwritten, []
        last, first_copy = self.open, self.open.stall is None
        if last.first:
            last = replace(last, since=self.started, stall=0.0)
        else:
            spent = max(0.0, now - last.since)
            if first_copy:
                back = max(0, step - 1) if self.back is None else self.back
                last = replace(last, stall=spent, again=max(0, self.reached - back))
            last = replace(last, lost=spent)
        self.open = last
        if step >= self.furthest:
            self.lost, self.open = self.lost + last.lost, None
        return [*told, last] if first_copy or self.open is None else told

    # ---- what it comes to ----

    @property
    def goodput(self) -> float:
        """The share of the time since the first copy in which steps were done that counted: 1 - lost / time.

        Time ends with the last copy; lost is the sum of `Beginning.lost`. Ranks that died before the first copy make
        the time begin with them.
        """
        total = 0.0 if self.started is None else self.mark - self.started
        return 1.0 if total <= 0.0 else max(0.0, 1.0 - self._all_lost / total)

    @property
    def _all_lost(self) -> float:
        return self.lost + (0.0 if self.open is None else self.open.lost)

    def metrics(self) -> dict[str, float]:
        """For a logger: deaths, seconds lost and goodput so far."""
        return {"deaths": float(self.deaths), "stall_seconds": self._all_lost, "goodput": self.goodput}

    # ---- from rank to rank ----

    def text(self) -> str:
        """JSON; `from_text` reads it."""
        return json.dumps(self._plain())

    def _plain(self) -> dict[str, Any]:
        # `asdict` would copy the names, for each step's copy.
        last = None if self.open is None else self.open.to_json()
        return {**vars(self), "open": last, "unwritten": [each.to_json() for each in self.unwritten]}

    def kept(self, step: int, now: float, *, complete: bool) -> str:
        """The text as it is once a copy is there that it shall be in; arguments are those of `copied`."""
        started = now if self.started is None else self.started
        kept = replace(
            self, started=started, mark=now, step=step, furthest=max(self.furthest, step),
            complete=complete or self.started is None,
        )  # fmt: skip
        return kept.text()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The history of a text."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        last = values["open"]
        return cls(
            **{
                **values,
                "open": None if last is None else Beginning.from_json(last),
                "unwritten": [Beginning.from_json(each) for each in values["unwritten"]],
            }
        )

    def told(self, left: Left) -> str:
        """The text that a rank tells the others of a new world; see `agreed`."""
        return json.dumps({"history": self._plain(), "left": left})

    @classmethod
    def agreed(cls, told: Sequence[str], now: float, ranks: int, names: Sequence[str]) -> Self:
        """The history of a new world, its beginning included.

        Args:
            told: By its ranks.
            now, ranks, names: See `begin`.
        """
        found = [json.loads(text) for text in told]
        histories = [cls._of(each["history"]) for each in found]
        newest = max(histories, key=lambda each: (each.number, each.mark))
        left = [Left(*each["left"]) for each, known in zip(found, histories) if known.number == newest.number]
        newest.begin(now, ranks, names, Left(_clearest([each.why for each in left]), any(each.torn for each in left)))
        return newest

    def following(self, kept: str) -> Self:
        """The history to go on with where a copy is found: that of the copy, where nobody is left who knows more.

        Args:
            kept: By `kept`; the beginning at hand is one more of it.
        """
        if self.number != 1 or self.started is not None or self.open is None:
            return self
        known = self.from_text(kept)
        known.begin(self.open.time, self.ranks, self.names, Left(_ALL_ENDED, torn=True))
        return known


def _places(names: set[str]) -> list[int]:
    """Numbers of places, of members' names."""
    return sorted(int(name.partition(":")[0]) for name in names)


def _clearest(texts: Sequence[str]) -> str:
    """The text that says most: a death that was seen, before one that was told, before connections that broke."""

    def unclear(text: str) -> tuple[bool, bool, bool]:
        return not text, any(part in text for part in OF_GROUPS), _AT_SECOND_HAND in text

    return min(texts, key=unclear, default="")
