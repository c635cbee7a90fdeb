"""Two recorded runs compared step by step: where they part. Nothing is computed again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_strategy.replay.comparison import Difference, compare_steps, differing
from zero_strategy.replay.run_journal import RunJournal, RunSession, read_run_journal
from zero_strategy.runtime.shown import shown


@dataclass(frozen=True)
class BisectReport:
    """The result of a bisection.

    Attributes:
        runs: Names of the two directories.
        ranks: Numbers of ranks of their first sessions.
        stages: Likewise.
        steps: First and last step that were compared.
        compared: How many.
        difference: The first; None: there is none.
        headers: What differs in settings, versions and machines, by name.
    """

    runs: tuple[str, str]
    ranks: tuple[int, int]
    stages: tuple[int, int]
    steps: tuple[int, int]
    compared: int
    difference: Difference | None
    headers: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """True if no recorded bit differs."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "equal": self.equal,
            "runs": list(self.runs),
            "ranks": list(self.ranks),
            "stages": list(self.stages),
            "steps": list(self.steps),
            "compared": self.compared,
            "difference": None if self.difference is None else self.difference.to_json(),
            "headers": {key: list(both) for key, both in self.headers.items()},
        }

    def __str__(self) -> str:
        sides = zip(self.runs, self.ranks, self.stages, strict=True)
        both = " and ".join(f"{run} ({ranks} rank(s), stage {stage})" for run, ranks, stage in sides)
        lines = [f"{both}: {self.compared} step(s) compared, {self.steps[0]} to {self.steps[1]}", ""]
        lines.append("EQUAL" if self.difference is None else f"DIFFERENT from {self.difference}")
        if self.headers:
            lines += ["", "settings, versions and machines that differ:"]
            lines += [f"  {key}: {ours!r} and {theirs!r}" for key, (ours, theirs) in self.headers.items()]
        return "\n".join(shown(line) for line in lines)


def bisect(run: str | os.PathLike[str], other: str | os.PathLike[str]) -> BisectReport:
    """Compare the journals of two runs, also of other numbers of ranks and stages, up to their first difference.

    Args:
        run: Directory of a run, as `diagnostics.run_dir` named it.
        other: That of another.

    Raises:
        ValueError: If a journal is missing or damaged, the runs have other numbers of slots, or no step in common.
        OSError: If one cannot be read.
    """
    ours, theirs = read_run_journal(run), read_run_journal(other)
    common = [step for step in ours.steps if step in theirs.sessions_of]
    if not common:
        raise ValueError(f"{_steps(ours)}, and {_steps(theirs)}: they have no step in common")
    difference, compared, at = None, 0, common[0]
    for at in common:
        check_same_slots(ours.session(at), theirs.session(at))
        difference, compared = compare_steps(ours.view(at), theirs.view(at)), compared + 1
        if difference is not None:
            break
    sessions = ours.session(at), theirs.session(at)
    headers = [session.header for session in sessions]
    return BisectReport(
        (ours.name, theirs.name),
        (int(headers[0]["world"]), int(headers[1]["world"])),
        (int(headers[0]["stage"]), int(headers[1]["stage"])),
        (common[0], at),
        compared,
        difference,
        differing(*headers),
    )


def check_same_slots(ours: RunSession, theirs: RunSession) -> None:
    """Raise if steps of two sessions are of other slots.

    Raises:
        ValueError: Naming both numbers.
    """
    a, b = int(ours.header["slots"]), int(theirs.header["slots"])
    if a != b:
        raise ValueError(
            f"reproducible.slots is {a} in {shown(ours.name)} and {b} in {shown(theirs.name)}: their steps are of "
            "other micro-batches and have no bits in common"
        )


def _steps(journal: RunJournal) -> str:
    steps = journal.steps
    return f"{shown(journal.name)} has steps {steps[0]} to {steps[-1]}" if steps else f"{shown(journal.name)} has none"
