"""Diagnosis of a hang or a desync: each rank's position, the first failure, and the report made of them.

A rank that fails says why here before it breaks its connections; the others, whose waits then end, find the cause.
Ranks also say how far they have come, for those that wait for them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Failure:
    """Why ranks cannot go on.

    Attributes:
        kind: What sort of failure, for whoever makes an exception of it.
        rank: Whose it is, in the world.
        text: In words, with the stage.
        details: Whatever belongs to the kind, as JSON has it.
    """

    kind: str
    rank: int
    text: str
    details: dict[str, Any]


class FailureBoard:
    """Board for one failure; the first one stays.

    Args:
        store: The process group's store, through a connection of its own; None: for one rank.
        key: Keeps boards apart; equal on all ranks.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, f"zero_strategy/failure/{key}"
        self._known: Failure | None = None

    def post(self, failure: Failure) -> Failure:
        """Post a failure, unless there is one.

        Returns:
            The one that is there now.
        """
        if self._known is None:
            self._known = failure
            if self._store is not None:
                with contextlib.suppress(Exception):  # the store is gone: nobody can be told
                    content = json.dumps(asdict(failure))
                    # Against an empty value only the first failure is taken; whoever comes later gets that one back.
                    self._known = _read(self._store.compare_set(self._key, "", content)) or failure
        return self._known

    def first(self, seconds: float = 0.0) -> Failure | None:
        """The failure that was posted first, waiting so long for one; None: nobody has failed."""
        end, pause = time.monotonic() + seconds, 0.005
        while self._known is None:
            with contextlib.suppress(Exception):
                if self._store is not None and self._store.check([self._key]):
                    self._known = _read(self._store.get(self._key))
            if self._known is not None or time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self._known

    def come_to(self, rank: int, batch: int) -> None:
        """A rank has come to a batch."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(f"{self._key}/at/{rank}", str(batch))

    def batch_of(self, rank: int) -> int | None:
        """The last batch that a rank has come to; 0: to none; None: that cannot be said."""
        with contextlib.suppress(Exception):
            key = f"{self._key}/at/{rank}"
            if self._store is not None:
                return int(self._store.get(key)) if self._store.check([key]) else 0
        return None


def _read(content: bytes | str) -> Failure | None:
    return Failure(**json.loads(content)) if content else None


Begun = tuple[str, str, int, str]
"""A collective as it is compared: kind, what of, bytes, dtype."""


NO_BACKWARD = (
    "If a rank's loss has no graph of the model (a constant, a batch that is skipped), it runs no backward, and the "
    "others wait for its part: give it a loss of the model's outputs, such as `0 * output.sum()`, which adds zeros"
)
"""Advice where some ranks run a backward and others do not."""


class DesyncError(RuntimeError):
    """Ranks cannot go on together: one has failed, is gone, is stopped, or came to another collective.

    Attributes:
        failure: What has happened, as all ranks were told; None if that is all in the message.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True)
class Wait:
    """Operation that a rank waits in.

    Attributes:
        what: In words: "all_gather of `layers.3`".
        ranks: World ranks that it takes to end.
        track: Numbers these collectives; empty if they are not ours.
        number: Which one of its track.
        message: It is for one message: of a pipeline, which has a watch of its own, or of somebody else.
        group: World ranks that take part, where that is not ours.
    """

    what: str
    ranks: tuple[int, ...]
    track: str = ""
    number: int = 0
    message: bool = False
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """Position of a rank.

    Attributes:
        rank: Its number in the world.
        beat: Of its reports.
        events: Collectives that it has begun or come out of.
        idle: Seconds since the last of them.
        site: Phase and place: "forward, train.py:88".
        wait: What it waits in; None: in nothing.
        note: What has befallen it, such as an exception in its forward; it has come to no collective since.
        ended: It has left training for good, as the note says.
        counts: Collectives begun, by track.
        recent: The last of them, by track and number: what is compared is what one thread noted at once.
        sees: Ranks of its host whose processes run, where there are other hosts.
    """

    rank: int
    beat: int = 0
    events: int = 0
    idle: float = 0.0
    site: str = ""
    wait: Wait | None = None
    note: str = ""
    ended: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, dict[int, Begun]] = field(default_factory=dict)
    sees: tuple[int, ...] = ()

    def encode(self) -> dict[str, Any]:
        """A form for JSON. It is sent often, so thousands of ranks are a few numbers in it."""
        values = asdict(self)
        if self.wait is not None:
            values["wait"].update(ranks=_as_runs(self.wait.ranks), group=_as_runs(self.wait.group))
        return {**values, "sees": _as_runs(self.sees)}

    @classmethod
    def decode(cls, values: dict[str, Any]) -> Report:
        """The inverse of `encode`."""
        # JSON has neither tuples nor numbers as keys, and what is compared has to be of the same types.
        wait = values.pop("wait")
        recent = {
            track: {int(number): (kind, of, nbytes, dtype) for number, (kind, of, nbytes, dtype) in rows.items()}
            for track, rows in values.pop("recent").items()
        }
        if wait is not None:
            wait = Wait(**{**wait, "ranks": _from_runs(wait["ranks"]), "group": _from_runs(wait["group"])})
        return cls(**{**values, "sees": _from_runs(values["sees"])}, recent=recent, wait=wait)

    def position(self) -> str:
        """The position in words."""
        site = f" ({self.site})" if self.site else ""
        if self.note:
            return self.note
        return f"waits in {self.wait.what}{site}" if self.wait is not None else f"is in no collective{site}"


def _as_runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as runs of equal steps: first, step and number of each."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (runs[-1][2] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            first, step, count = runs[-1]
            runs[-1] = [first, rank - first if count == 1 else step, count + 1]
        else:
            runs.append([rank, 0, 1])
    return runs


def _from_runs(runs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The inverse."""
    return tuple(first + step * place for first, step, count in runs for place in range(count))


RankLabels = Callable[[int], str]


def rank_label(rank: int) -> str:
    """A rank in words, where it is nothing but a rank."""
    return f"rank {rank}"


def find_failure(
    own: Report,
    others: Iterable[Report],
    *,
    fresh: Collection[int],
    silence: float,
    rank_labels: RankLabels = rank_label,
) -> Failure | None:
    """Why a rank that waits has no more reason to; None: it may be that the others only take long.

    Args:
        own: Of the rank that waits.
        others: The last reports of other ranks.
        fresh: Of which of them it is known that they still hold.
        silence: Seconds after which a rank that something has befallen is not expected back.
        rank_labels: Ranks in words.
    """
    reports = {report.rank: report for report in [*others, own]}
    return (
        _befallen(own, reports, silence, rank_labels)
        or _different(own, reports, {*fresh, own.rank}, rank_labels)
        or _locked(own, reports, {*fresh, own.rank}, rank_labels)
    )


def positions(reports: Iterable[Report], rank_labels: RankLabels = rank_label) -> str:
    """Positions of the ranks, ranks at the same place together."""
    groups: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        groups.setdefault(report.position(), []).append(report.rank)
    found = []
    for where, ranks in groups.items():
        verb, _, rest = where.partition(" ")
        found.append(
            f"{listed(ranks, rank_labels)} {where if len(ranks) == 1 else f'{_PLURAL.get(verb, verb)} {rest}'}"
        )
    return "; ".join(found)


_PLURAL = {"waits": "wait", "is": "are"}


def listed(ranks: Iterable[int], rank_labels: RankLabels = rank_label) -> str:
    """Several ranks in words."""
    ranks = list(ranks)
    if len(ranks) > 1 and all(rank_labels(rank) == rank_label(rank) for rank in ranks):
        return f"ranks {', '.join(map(str, ranks))}"
    return ", ".join(map(rank_labels, ranks))


def _befallen(own: Report, reports: Mapping[int, Report], silence: float, rank_labels: RankLabels) -> Failure | None:
    for rank in _missing(own, reports):
        report = reports.get(rank)
        if report is not None and report.note and (report.ended or report.idle >= silence):
            text = f"{rank_labels(rank)} {report.note}; {rank_labels(own.rank)} {own.position()}"
            return Failure("raised", rank, text, {})
    return None


def _different(
    own: Report, reports: Mapping[int, Report], fresh: Collection[int], rank_labels: RankLabels
) -> Failure | None:
    """The first collective of a track that is not the same on all ranks, as far back as is known."""
    for track, recent in own.recent.items():
        for rank, report in reports.items():
            for number, mine in sorted(recent.items()):
                theirs = report.recent.get(track, {}).get(number, mine)
                if mine != theirs:
                    # The report that shows another collective counts, however old: it says where that began.
                    known = [each for each in reports.values() if each.rank in fresh or each.rank == rank]
                    begun = sorted({own.rank: mine, rank: theirs}.items())
                    told = ", ".join(f"{rank_labels(each)} began {shown(one)}" for each, one in begun)
                    text = f"ranks came to different collectives: as number {number} of the same group {told}; "
                    text += positions(known, rank_labels)
                    if "all_gather" in (mine[0], theirs[0]):
                        text += f"; {_SKIPPED}"
                    return Failure("different", rank, text + _advice(known), {})
    return None


_SKIPPED = (
    "if ranks ran different layers (LayerDrop, or branches that depend on data), set units.may_skip: true for layers "
    "of a list that ranks skip, or use stage 2"
)
"""A cause that user code has where parameters are gathered, and the way out."""


def _advice(reports: Iterable[Report]) -> str:
    """A sentence more, where some ranks are in a backward and others are not."""
    backward = {report.site.startswith("backward") for report in reports if not report.note}
    return f". {NO_BACKWARD}" if len(backward) == 2 else ""


def shown(begun: Begun) -> str:
    """A collective in words, with all that is compared."""
    kind, of, nbytes, dtype = begun
    size = ", ".join(filter(None, (f"{nbytes} bytes" if nbytes else "", dtype)))
    return named(kind, of) + (f" ({size})" if size else "")


def named(kind: str, of: str) -> str:
    """A collective in words."""
    return f"{kind} of `{of}`" if of else kind


def _missing(own: Report, reports: Mapping[int, Report]) -> list[int]:
    """Ranks that have not come to what a rank waits in, or of which that is not known."""
    wait = own.wait
    if wait is None:
        return []
    return [rank for rank in wait.ranks if rank != own.rank and not _has_come(reports.get(rank), wait)]


def _has_come(report: Report | None, wait: Wait) -> bool:
    if report is None:
        return False
    if wait.track:
        return report.counts.get(wait.track, 0) >= wait.number
    # Collectives of torch's own have no numbers here: one name and the same ranks stand for one call.
    theirs = report.wait
    return theirs is not None and not theirs.track and (theirs.what, theirs.group) == (wait.what, wait.group)


def _locked(
    own: Report, reports: Mapping[int, Report], fresh: Collection[int], rank_labels: RankLabels
) -> Failure | None:
    """The failure of ranks that wait for each other: none of those that this one waits for can get on."""
    waiting = {
        rank: report
        for rank, report in reports.items()
        if rank in fresh and report.wait is not None and not report.wait.message
    }
    stuck = dict(waiting)
    while freed := [rank for rank, report in stuck.items() if not set(_missing(report, reports)) & stuck.keys()]:
        # Whoever waits for nobody that is stuck may get on, and then those that wait only for such ranks.
        for rank in freed:
            del stuck[rank]
    if own.rank not in stuck:
        return None
    text = f"ranks wait for each other: {positions(stuck.values(), rank_labels)}{_advice(stuck.values())}"
    return Failure("locked", min(set(_missing(own, reports)) & stuck.keys()), text, {})
