"""Two steps compared: the first thing that differs, and of which kind the fault is that explains it.

config     hyper-parameters, the loss scale or the clip
weights    the weights before the step, or after it with equal gradients
data       what a slot computes with
seed       the random stream of a slot, with equal data
kernel     outputs or the loss of a slot, with equal data, stream and weights
race       reduced gradients, with equal outputs and losses: a race, or a kernel of the backward
norm       the gradient norm, or whether the step was taken, with equal gradients
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from zero_strategy.diagnostics.digests import MASK
from zero_strategy.diagnostics.journal_file import SlotEntry
from zero_strategy.diagnostics.journal_header import Line
from zero_strategy.replay.run_journal import Rows, StepView, group_name

Kind = Literal["config", "weights", "data", "seed", "kernel", "race", "norm"]


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        step: Its number, from 0.
        kind: See the module.
        slot: The slot, "slot 3", or slots that are recorded together; "": it is none's.
        ranks: Of the first run: those that computed the slot, or whose part differs; empty: it cannot be told.
        other_ranks: Likewise, of the second run.
        unit: Name of the module, or of neighbours that are recorded together; "": it is none's.
        detail: A sentence.
    """

    step: int
    kind: Kind
    detail: str
    slot: str = ""
    ranks: tuple[int, ...] = ()
    other_ranks: tuple[int, ...] = ()
    unit: str = ""

    def __str__(self) -> str:
        place = [f"step {self.step}", *([self.slot] if self.slot else []), *([self.unit] if self.unit else [])]
        if self.ranks and self.other_ranks not in ((), self.ranks):
            place.append(f"on {_ranks(self.ranks)} ({_ranks(self.other_ranks)} in the other run)")
        elif self.ranks or self.other_ranks:
            place.append(f"on {_ranks(self.ranks or self.other_ranks)}{'' if self.ranks else ' of the other run'}")
        return f"{', '.join(place)}: {self.kind}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def compare_steps(ours: StepView, theirs: StepView) -> Difference | None:
    """The first difference of the same step of two runs with as many slots; None: there is none that is recorded."""
    lines = joined(ours.lines, theirs.lines)
    return (
        _config(ours, theirs)
        or _weights(ours, theirs, lines, before=True)
        or _slots(ours, theirs, lines)
        or _gradients(ours, theirs, lines)
        or _norm(ours, theirs)
        or _weights(ours, theirs, lines, before=False)
    )


# ---- settings, slots, norm ----


def _config(ours: StepView, theirs: StepView) -> Difference | None:
    keys = [key for key in {**ours.hyper, **theirs.hyper} if ours.hyper.get(key) != theirs.hyper.get(key)]
    if keys or ours.entry.hyper != theirs.entry.hyper:
        said = [f"{key} is {ours.hyper.get(key)} and {theirs.hyper.get(key)}" for key in keys]
        return Difference(ours.step, "config", "; ".join(said) or "hyper-parameters differ in their last bits")
    clips = [(v.entry.clip, v.entry.bound, v.entry.partly) for v in (ours, theirs)]
    if clips[0] != clips[1]:
        said = [f"{bound} by {kind}" if kind else "nothing" for kind, bound, _ in clips]
        return Difference(ours.step, "config", f"gradients were clipped to {said[0]} and to {said[1]}")
    return None


def _slots(ours: StepView, theirs: StepView, lines: Sequence[JoinedLine]) -> Difference | None:
    total = sum(entry.slots for entry in ours.slots.values())
    for group in ours.slots:
        if (found := _slot_kind(ours.slots[group], theirs.slots[group])) is None:
            continue
        kind, detail = found
        unit = _first_output(ours, theirs, lines) if kind == "kernel" else ""
        if unit:
            detail += f"; of the modules' outputs that of {unit} is the first that differs"
        elif kind == "kernel":
            detail += "; no module's output differs where it was looked at: it is in the loss, or between samples"
        ranks = ours.ranks_of[group], theirs.ranks_of[group]
        return Difference(ours.step, kind, detail, group_name(group, total), *ranks, unit)
    if unit := _first_output(ours, theirs, lines):
        return Difference(ours.step, "kernel", "its output differs, and no loss does", unit=unit)
    return None


def _slot_kind(ours: SlotEntry, theirs: SlotEntry) -> tuple[Kind, str] | None:
    if ours.inputs != theirs.inputs:
        return "data", "the module was called with other inputs"
    if ours.batch and theirs.batch and ours.batch != theirs.batch:
        return "data", "the batch is another, in what the module itself is not called with"
    if ours.stream != theirs.stream:
        return "seed", "random numbers differ: another seed, or as many were not drawn"
    if ours.loss and theirs.loss and ours.loss != theirs.loss:
        a, b = ours.loss_value, theirs.loss_value
        return "kernel", "the loss differs" if a is None or b is None else f"the loss is {a!r} and {b!r}"
    if ours.output != theirs.output:
        return "kernel", "the model's output differs"
    return None


def _first_output(ours: StepView, theirs: StepView, lines: Sequence[JoinedLine]) -> str:
    """The first unit, in the order of forwards, whose outputs differ; the root, which ends last, comes last."""
    for line in [*lines[1:], *lines[:1]]:
        if line.same_units:
            sums = [
                sum(v.forward[i] for i in places) & 0xFFFFFFFF
                for v, places in ((ours, line.ours), (theirs, line.theirs))
            ]
            if sums[0] != sums[1]:
                return line.name
    return ""


def _norm(ours: StepView, theirs: StepView) -> Difference | None:
    a, b = ours.entry, theirs.entry
    if a.norm is not None and b.norm is not None and a.norm != b.norm and not (a.norm != a.norm and b.norm != b.norm):
        return Difference(ours.step, "norm", f"gradients are equal, and their norm is {a.norm!r} and {b.norm!r}")
    if a.skipped != b.skipped:
        return Difference(ours.step, "norm", "one run took the step, and the other one skipped it")
    return None


# ---- gradients and weights, by unit ----


def _gradients(ours: StepView, theirs: StepView, lines: Sequence[JoinedLine]) -> Difference | None:
    found = list(_unequal(ours.gradients, theirs.gradients, lines))
    if not found:
        return None
    # Backwards end with the root, and go from the last unit to the first.
    line = next((line for line in reversed(found) if line is not lines[0]), found[0])
    ranks = _culprits(ours, theirs, ours.gradients, theirs.gradients, line)
    detail = "reduced gradients differ, and no output or loss does"
    if others := [other.name for other in found if other is not line]:
        detail += f"; also of {_listed(others)}"
    return Difference(ours.step, "race", detail, "", *ranks, line.name)


def _weights(ours: StepView, theirs: StepView, lines: Sequence[JoinedLine], *, before: bool) -> Difference | None:
    a, b = (ours.weights_before, theirs.weights_before) if before else (ours.weights, theirs.weights)
    if a is None or b is None or not (found := list(_unequal(a, b, lines))):
        return None
    when = "before the step" if before else "after it, though gradients are equal"
    detail = f"weights differ {when}" + (f"; also of {_listed([o.name for o in found[1:]])}" if found[1:] else "")
    return Difference(ours.step, "weights", detail, "", *_culprits(ours, theirs, a, b, found[0]), found[0].name)


def _unequal(a: Rows, b: Rows, lines: Sequence[JoinedLine]) -> Iterator[JoinedLine]:
    """Lines of which not all rows of both runs have the same digest."""
    for line in lines:
        if len({*_by_row(a, line.ours).values(), *_by_row(b, line.theirs).values()}) > 1:
            yield line


def _by_row(rows: Rows, places: Sequence[int]) -> dict[int, int]:
    return {row: sum(d[i] for d in ranks.values() for i in places) & MASK for row, ranks in rows.items()}


def _culprits(
    ours: StepView, theirs: StepView, a: Rows, b: Rows, line: JoinedLine
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks whose part differs, where both runs have the same parts; else those of rows that differ from most."""
    if {r: (p.row, p.pieces) for r, p in ours.places.items()} == {
        r: (p.row, p.pieces) for r, p in theirs.places.items()
    }:
        mine, other = _by_rank(a, line.ours), _by_rank(b, line.theirs)
        found = tuple(rank for rank in sorted(mine) if mine[rank] != other[rank])
        return found, found
    rows = _by_row(a, line.ours), _by_row(b, line.theirs)
    votes = Counter([*rows[0].values(), *rows[1].values()]).most_common(2)
    if len(votes) > 1 and votes[0][1] == votes[1][1]:
        return (), ()
    odd = [tuple(rank for row, sum_ in found.items() if sum_ != votes[0][0] for rank in sorted(table[row]))
           for found, table in zip(rows, (a, b), strict=True)]  # fmt: skip
    # One row against another tells nothing of the ranks in it.
    return odd[0] if len(rows[0]) > 1 else (), odd[1] if len(rows[1]) > 1 else ()


def _by_rank(rows: Rows, places: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(digests[i] for i in places) for ranks in rows.values() for rank, digests in ranks.items()}


# ---- lines of two runs ----


class JoinedLine(NamedTuple):
    """Lines of two runs that have parameters in common.

    Attributes:
        name: For people.
        ours, theirs: Their numbers.
        same_units: Both have the same modules in them.
    """

    name: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    same_units: bool


def joined(ours: Sequence[Line], theirs: Sequence[Line]) -> list[JoinedLine]:
    """Lines that can be compared: as they are, or put together where the runs divide parameters differently."""
    if list(ours) == list(theirs):
        return [JoinedLine(line.name, (number,), (number,), True) for number, line in enumerate(ours)]
    owner: dict[str, int] = {}
    merged: list[tuple[list[int], list[int]]] = []
    for side, lines in enumerate((ours, theirs)):
        for number, line in enumerate(lines):
            known = sorted({owner[name] for name in line.parameters if name in owner})
            into = known[0] if known else len(merged)
            if not known:
                merged.append(([], []))
            for other in known[1:]:
                for mine, those in zip(merged[into], merged[other], strict=True):
                    mine += those
                    those.clear()
                owner.update({name: into for name, at in owner.items() if at == other})
            merged[into][side].append(number)
            owner.update(dict.fromkeys(line.parameters, into))
    found = [_joined_line(ours, theirs, *both) for both in merged if any(both)]
    return sorted(found, key=lambda line: line.ours or line.theirs)


def _joined_line(ours: Sequence[Line], theirs: Sequence[Line], a: list[int], b: list[int]) -> JoinedLine:
    units = [
        {unit for number in numbers for unit in lines[number].units} for lines, numbers in ((ours, a), (theirs, b))
    ]
    name = Line(tuple(sorted(units[0] or units[1])), ()).name
    return JoinedLine(name, tuple(sorted(a)), tuple(sorted(b)), units[0] == units[1])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Entries of two headers that differ, by dotted name; parts, lines and times are left out."""
    mine, other = _flat(ours), _flat(theirs)
    keys = [*mine, *(key for key in other if key not in mine)]
    return {key: (mine.get(key), other.get(key)) for key in keys if mine.get(key) != other.get(key)}


_NOT_SHOWN = {"session", "rank", "row", "own", "pieces", "lines", "written", "hyper"}


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in header.items():
        if prefix or key not in _NOT_SHOWN:
            if isinstance(value, Mapping):
                found |= _flat(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value
    return found
