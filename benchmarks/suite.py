"""Definition of a suite of the benchmark command: a name, and a function from options to rows."""

from __future__ import annotations

import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.contenders import missing
from benchmarks.ratios import Ratio, bootstrap

T = TypeVar("T")
PEERS = ("ddp", "zero_redundancy", "fsdp2", "deepspeed", "dcp", "pipelining", "accelerate", "lightning")
_NEWLINE = "\n"
_OTHERS = {"accelerate": "pip install accelerate", "lightning": "pip install lightning"}
"""What is needed of the peers that are no contenders of the step benchmark."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        suite: Where it was measured.
        what: What was measured, the peer's name in it or beside it.
        peer: With whom.
        ratio: The peer's figure over ours: above 1 ours is better. Median of the rounds.
        low, high: Ends of its bootstrap 95 % interval.
        ours, theirs: The figures themselves, medians.
        unit: Of the figures: "s", "bytes", "elements".
        note: What to know about it.
        details: Whatever else was measured, for the JSON.
    """

    suite: str
    what: str
    peer: str
    ratio: float
    low: float
    high: float
    ours: float
    theirs: float
    unit: str
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Options of all suites.

    Attributes:
        peers: With whom to compare.
        rounds: Of A B B A.
        ranks: Numbers of ranks.
        stages: Of ours.
        regimes, precisions: Of a step.
        quick: Only to see that everything works: the smallest models.
        folder: For files, on the drive to be measured.
        timeout: Seconds for one comparison.
        skipped: What was left out and why, filled by the suites.
        failed: What went wrong, likewise.
    """

    peers: tuple[str, ...] = PEERS
    rounds: int = 8
    ranks: tuple[int, ...] = (2,)
    stages: tuple[int, ...] = (0, 1, 2, 3)
    regimes: tuple[str, ...] = ("communication", "balanced", "compute")
    precisions: tuple[str, ...] = ("fp32", "bf16")
    quick: bool = False
    folder: Path = Path()
    timeout: float = 3600.0
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def wants(self, peer: str) -> bool:
        """True if a peer is to be compared; notes the one that is asked for and not installed."""
        if peer not in self.peers:
            return False
        if peer in _OTHERS and importlib.util.find_spec(peer) is None:
            self.skip(f"{peer} is not installed: {_OTHERS[peer]}")
            return False
        if (lacking := missing(peer)) is not None:
            self.skip(lacking)
            return False
        return True

    def skip(self, text: str) -> None:
        """Note once what is left out."""
        if text not in self.skipped:
            self.skipped.append(text)
            print(f"skipped {text}", file=sys.stderr, flush=True)

    def tried(self, what: str, run: Callable[[], list[Row]]) -> list[Row]:
        """Findings of a comparison; nothing if it fails, since hours of the others are worth more than that one."""
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{what}: failed: {type(error).__name__}: {str(error).partition(_NEWLINE)[0]}")
            return []


@dataclass(frozen=True)
class Suite:
    """A part of the benchmark command.

    Attributes:
        name: By which it is chosen.
        summary: What it measures.
        run: Measures it.
    """

    name: str
    summary: str
    run: Callable[[Options], list[Row]]


def row_of(suite: str, what: str, peer: str, ratio: Ratio, ours: float, theirs: float, unit: str, **more: Any) -> Row:
    """A row from what `bootstrap` found."""
    return Row(suite, what, peer, ratio.median, ratio.low, ratio.high, ours, theirs, unit, **more)


def exact(suite: str, what: str, peer: str, ours: float, theirs: float, unit: str, **more: Any) -> Row:
    """A row of figures that are counted, or measured once."""
    return row_of(suite, what, peer, bootstrap([theirs / ours]), ours, theirs, unit, **more)


def rows_of(
    suite: str, options: Options, cases: Sequence[T], name: Callable[[T], str], measure: Callable[[T], list[Row]]
) -> list[Row]:
    """The rows of all cases, with a line on standard error before each: which one, and how long the rest may take."""
    start = time.monotonic()
    rows = []
    for number, case in enumerate(cases):
        passed = time.monotonic() - start
        left = f", about {_minutes(passed / number * (len(cases) - number))} left" if number else ""
        line = f"[{suite} {number + 1}/{len(cases)}] {name(case)} ({_minutes(passed)}{left})"
        print(line, file=sys.stderr, flush=True)
        rows += options.tried(f"{suite}, {name(case)}", partial(measure, case))
    return rows


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def joined(parts: Iterable[str]) -> str:
    """The parts that say something, in a row."""
    return "; ".join(part for part in parts if part)
