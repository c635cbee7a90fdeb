"""The journals of all ranks of a run as one: sessions, and steps in which ranks' digests are added up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zero_strategy.diagnostics.journal_file import Session, SlotEntry, StepEntry, folded_by, journal_path, read_sessions
from zero_strategy.diagnostics.journal_header import Line, Place, lines_in, place_in
from zero_strategy.runtime.shown import shown

Rows = Mapping[int, Mapping[int, tuple[int, ...]]]
"""Digests by line, by row of ranks and rank: those of a row add up to the whole."""


@dataclass(frozen=True)
class StepView:
    """A step of a run.

    Attributes:
        step: Its number, from 0.
        entry: What all ranks wrote alike (norm, clip, ...), of the first.
        hyper: Hyper-parameters of the optimizers, and the loss scale.
        slots: By group.
        ranks_of: Ranks that computed slots of a group.
        forward: By line, over all slots.
        gradients: Reduced.
        weights: After the step; None: there are no digests of it.
        weights_before: Before it, likewise.
        lines: Units.
        places: By rank.
    """

    step: int
    entry: StepEntry
    hyper: Mapping[str, Any]
    slots: Mapping[int, SlotEntry]
    ranks_of: Mapping[int, tuple[int, ...]]
    forward: tuple[int, ...]
    gradients: Rows
    weights: Rows | None
    weights_before: Rows | None
    lines: Sequence[Line]
    places: Mapping[int, Place]


@dataclass
class RunSession:
    """Records of all ranks from a start, or a resume, to its end.

    Attributes:
        name: Of the run, for errors.
        ranks: By number.
    """

    name: str
    ranks: dict[int, Session] = field(default_factory=dict)

    @property
    def header(self) -> Mapping[str, Any]:
        """The header of the first rank."""
        return self.ranks[min(self.ranks)].header

    @cached_property
    def places(self) -> dict[int, Place]:
        """Places of ranks."""
        return {rank: place_in(session.header) for rank, session in self.ranks.items()}

    @cached_property
    def lines(self) -> list[Line]:
        """Lines of all ranks."""
        return lines_in(self.header)

    def check_ranks(self) -> None:
        """Raise if a rank has written nothing.

        Raises:
            ValueError: Naming its file.
        """
        world = int(self.header["world"])
        if missing := [rank for rank in range(world) if rank not in self.ranks]:
            names = ", ".join(journal_path(Path(), rank).name for rank in missing)
            raise ValueError(
                f"{shown(self.name)}: the journal of rank {missing[0]} is missing ({names}), and the run had {world} "
                "ranks: copy the files of all ranks into one directory"
            )

    @property
    def steps(self) -> list[int]:
        """Steps that all ranks have written, in order: a run that was killed may have begun another.

        Raises:
            ValueError: If a rank has not written one that others have, and a later one.
        """
        each = {rank: session.steps.keys() for rank, session in self.ranks.items()}
        common = sorted(set.intersection(*map(set, each.values())))
        for rank, steps in each.items():
            gaps = [
                step for other in each.values() for step in other if step not in steps and step < max(common, default=0)
            ]
            if gaps:
                raise ValueError(
                    f"{shown(self.name)}: the journal of rank {rank} lacks step {min(gaps)}: it is damaged"
                )
        return common

    def hyper(self, step: int) -> dict[str, Any]:
        """Hyper-parameters at a step."""
        first = self.ranks[min(self.ranks)]
        found = dict(first.header["hyper"])
        for number in sorted(first.hyper):
            if number <= step:
                found.update(first.hyper[number])
        return {key: value for key, value in found.items() if value is not None or key in first.header["hyper"]}

    def view(self, step: int) -> StepView:
        """A step, over all ranks.

        Raises:
            ValueError: If slots of it are missing.
        """
        entries = {rank: session.steps[step] for rank, session in sorted(self.ranks.items())}
        slots: dict[int, SlotEntry] = {}
        ranks_of: dict[int, tuple[int, ...]] = {}
        for rank, entry in entries.items():
            for group in entry.slots:
                slots[group.group] = slots[group.group] + group if group.group in slots else group
                ranks_of[group.group] = (*ranks_of.get(group.group, ()), rank)
        self._check_slots(step, slots)
        columns = zip(*(entry.forward for entry in entries.values()), strict=True)
        return StepView(
            step,
            entries[min(entries)],
            self.hyper(step),
            dict(sorted(slots.items())),
            ranks_of,
            tuple(sum(column) & 0xFFFFFFFF for column in columns),
            self._rows({rank: entry.gradients for rank, entry in entries.items()}),
            self._weights(step),
            self._weights(step - 1),
            self.lines,
            self.places,
        )

    def _check_slots(self, step: int, slots: Mapping[int, SlotEntry]) -> None:
        wanted = int(self.header["slots"])
        if (there := sum(entry.slots for entry in slots.values())) != wanted:
            raise ValueError(f"{shown(self.name)}: step {step} has {there} of {wanted} slots: a journal is damaged")

    def _weights(self, step: int) -> Rows | None:
        if any(step not in session.weights for session in self.ranks.values()):
            return None
        return self._rows({rank: session.weights[step] for rank, session in self.ranks.items()})

    def _rows(self, digests: Mapping[int, tuple[int, ...]]) -> Rows:
        rows: dict[int, dict[int, tuple[int, ...]]] = {}
        for rank, found in digests.items():
            rows.setdefault(self.places[rank].row, {})[rank] = found
        return rows


@dataclass
class RunJournal:
    """The journal of a run.

    Attributes:
        name: The directory, for people.
        sessions: In order; steps that a later one has taken again are in that one alone.
    """

    name: str
    sessions: list[RunSession]

    @cached_property
    def sessions_of(self) -> dict[int, RunSession]:
        """The session of each step, in order of steps."""
        found = {step: session for session in self.sessions for step in session.steps}
        return dict(sorted(found.items()))

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps."""
        return list(self.sessions_of)

    def view(self, step: int) -> StepView:
        """A step.

        Raises:
            ValueError: If it is not there, or damaged.
        """
        return self.session(step).view(step)

    def session(self, step: int) -> RunSession:
        """The session of a step.

        Raises:
            ValueError: If there is no such step; says which there are.
        """
        if step not in self.sessions_of:
            steps = self.steps
            there = f"it has steps {steps[0]} to {steps[-1]}, counted from 0" if steps else "it has none"
            raise ValueError(f"{shown(self.name)}: the journal has no step {step}; {there}")
        return self.sessions_of[step]


def read_run_journal(directory: str | os.PathLike[str]) -> RunJournal:
    """Read the journals of all ranks in a run's directory.

    Raises:
        ValueError: If there is none, one is missing or damaged; names it.
        OSError: If one cannot be read.
    """
    folder, name = Path(directory), os.fspath(directory)
    paths = {int(path.stem.partition("-")[2]): path for path in folder.glob("journal-[0-9]*.bin")}
    if not paths:
        raise ValueError(
            f"{shown(name)} holds no journal (journal-RANK.bin): give the directory that diagnostics.run_dir named, of "
            "a run with reproducible.slots"
        )
    if 0 not in paths:
        raise ValueError(f"{shown(name)}: journal-0.bin is missing; copy the files of all ranks into one directory")
    written = {rank: read_sessions(path) for rank, path in sorted(paths.items())}
    sessions = {str(session.header["session"]): RunSession(name) for session in written[0]}
    for rank, own in written.items():
        for part in own:
            if (known := sessions.get(str(part.header["session"]))) is not None:
                known.ranks[rank] = part
    found = [session for session in sessions.values() if session.header.get("slots")]
    for session in found:
        session.check_ranks()
    _drop_retaken(found)
    return RunJournal(name, found)


def _drop_retaken(sessions: list[RunSession]) -> None:
    """Forget steps that a later session has taken again, and what came after them, on all ranks."""
    first: int | None = None
    for session in reversed(sessions):
        if first is not None:
            for own in session.ranks.values():
                own.drop_from(first)
        begins = [own.first for own in session.ranks.values() if own.first is not None]
        first = min([*begins, *([] if first is None else [first])], default=None)


def group_name(group: int, slots: int) -> str:
    """A group of slots, for people."""
    fold = folded_by(slots)
    if fold == 1:
        return f"slot {group}"
    return f"slots {group * fold} to {min((group + 1) * fold, slots) - 1}"
