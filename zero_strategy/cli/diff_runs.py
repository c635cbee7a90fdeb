"""Two runs compared: folders with checkpoints of several steps, and the first step at which they differ.

Steps that both have are paired. Checksums in the manifests tell most of what is equal and what is not, without a byte
read. Where ranks divided tensors in another way they do not tell, and tensors are read: the middle of what is left,
since two trainings that differ once go on to differ. The first step that differs, and the one before, are then compared
in full; were that one not equal, the search goes on before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from zero_strategy.checkpoint.folders import find_checkpoints, is_export
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.checkpoint.storage import RemoteFolder, is_remote
from zero_strategy.cli.diff_checkpoints import bytes_to_compare, compare, equal_by_checksums, tensors_differ
from zero_strategy.cli.diff_found import Comparison, Side, step_of
from zero_strategy.cli.diff_records import compare_records
from zero_strategy.cli.diff_report import as_json, report
from zero_strategy.convert.convert import open_any

Bar = Callable[[str], AbstractContextManager[Callable[[int], Callable[[int], object]]]]
"""From the name of some work to a bar: given the bytes of it, it returns what is told of each part."""


@dataclass(frozen=True)
class Run:
    """A folder of checkpoints.

    Attributes:
        path: The folder.
        steps: Optimizer steps -> the checkpoint; of several with as many steps the one that was saved last.
        unusable: Names of what is incomplete, damaged, or does not tell its steps.
    """

    path: str
    steps: Mapping[int, str]
    unusable: tuple[str, ...] = ()


@dataclass
class RunsComparison:
    """Comparison of two runs.

    Attributes:
        a, b: The two.
        steps: Steps that both have, in order.
        first: The first of them at which anything differs; None if nothing does.
        before: The one before, whose checkpoints were read in full and are equal; None if there is none.
        first_of_tensors: The first at which a tensor differs; None if none does.
        found: All differences at `first`; None if there are none.
        read: Steps of which tensors were read; the others were compared by their checksums.
    """

    a: Run
    b: Run
    steps: list[int]
    first: int | None = None
    before: int | None = None
    first_of_tensors: int | None = None
    found: Comparison | None = None
    read: set[int] = field(default_factory=set)


def run_of(path: str) -> Run | None:
    """The run in a folder; None for what is a checkpoint itself, or has none of ours in it.

    Raises:
        ValueError, OSError: If it cannot be looked into.
    """
    if is_remote(path):
        found, unusable = _remote(path)
    elif os.path.isdir(path) and not os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        found, unusable = _local(path)
    else:
        return None
    return Run(path, found, tuple(unusable)) if found else None


def opened(a: str, b: str, runs: Sequence[Run | None], *, verify: bool) -> tuple[StateReader, StateReader]:
    """Two checkpoints, one of which may be given as a folder: then its checkpoint of as many steps as the other has.

    Args:
        a: One.
        b: The other.
        runs: What `run_of` says of each.
        verify: Compare checksums of what is read.

    Raises:
        ValueError: If one cannot be opened.
    """
    paths = [a, b]
    for number, run in enumerate(runs):
        if run is not None:
            step = Side.of(open_any(paths[1 - number], verify=False)).step
            paths[number] = run.steps.get(step, paths[number]) if step is not None else paths[number]
    return open_any(paths[0], verify=verify), open_any(paths[1], verify=verify)


def _local(path: str) -> tuple[dict[int, str], list[str]]:
    found, unusable = dict[int, str](), []
    for each in find_checkpoints(path):  # oldest first
        if each.is_export:
            continue
        if each.complete and each.step is not None:
            found[each.step] = str(each.path)
        else:
            unusable.append(each.path.name)
    return found, unusable


def _remote(url: str) -> tuple[dict[int, str], list[str]]:
    folder, found, unusable = RemoteFolder(url), dict[int, str](), []
    for name in () if folder.manifest() is not None else folder.names():
        child = folder.child(name)
        try:
            manifest = child.manifest()
        except ValueError:
            unusable.append(name)
            continue
        if manifest is None or is_export(manifest):
            continue
        step = step_of(manifest.counters)
        if step is None:
            unusable.append(name)
        else:
            found[step] = child.url
    return found, unusable


def compare_runs(
    a: Run,
    b: Run,
    bar: Bar,
    *,
    verify: bool = True,
    weights_only: bool = False,
    tolerance: int = 0,
) -> RunsComparison:
    """Compares two runs.

    Args:
        a: One.
        b: The other.
        bar: Makes bars of what is read.
        verify, weights_only, tolerance: See `diff_checkpoints.compare`.

    Raises:
        ValueError: If they have no step in common, or a checkpoint that is read is damaged.
    """
    steps = sorted(a.steps.keys() & b.steps.keys())
    if not steps:
        raise ValueError(
            f"no step in common: {a.path} has checkpoints of steps {_listed(a)}, {b.path} of {_listed(b)}; give two "
            "checkpoints instead"
        )
    search = _Search(a, b, bar, steps, verify, weights_only, tolerance)
    found = search.found
    first_of_records = search.by_manifests()
    found.first_of_tensors = search.of_tensors()
    while True:
        known = [step for step in (first_of_records, found.first_of_tensors) if step is not None]
        if not known:
            return found
        found.first = min(known)
        number = steps.index(found.first)
        found.before = steps[number - 1] if number else None
        # Read in full: that the step before is equal was told by checksums, or follows from what lies before it.
        if found.before is None or not (earlier := search.compared(found.before)).differences:
            found.found = search.compared(found.first)
            return found
        if earlier.of_tensors:
            found.first_of_tensors = found.before
        else:
            first_of_records = found.before


def _listed(run: Run) -> str:
    steps = sorted(run.steps)
    shown = [str(step) for step in steps[:5]] + ([f"... {steps[-1]}"] if len(steps) > 5 else [])
    return ", ".join(shown)


class _Search:
    """A search for the first step of two runs that differs."""

    def __init__(
        self, a: Run, b: Run, bar: Bar, steps: list[int], verify: bool, weights_only: bool, tolerance: int
    ) -> None:
        self.found = RunsComparison(a, b, steps)
        self._bar, self._verify, self._weights_only, self._tolerance = bar, verify, weights_only, tolerance
        # Steps before the first that is known to differ, of which checksums do not tell whether tensors are equal.
        self._unknown: list[int] = []
        self._different: int | None = None
        self._compared: dict[int, Comparison] = {}

    def by_manifests(self) -> int | None:
        """Compare manifests and small files, up to the first step whose tensors differ for certain.

        Returns:
            The first step with records that differ.
        """
        first: int | None = None
        with self._bar("manifests") as start:
            told = start(len(self.found.steps))
            for step in self.found.steps:
                a, b = self._opened(step)
                told(1)
                if first is None and self._records_differ(a, b):
                    first = step
                equal = equal_by_checksums(a, b, weights_only=self._weights_only)
                if equal is False and not self._tolerance:
                    self._different = step
                    break
                if equal is not True:
                    self._unknown.append(step)
        return first

    def of_tensors(self) -> int | None:
        """The first step whose tensors differ, by reading what checksums do not tell."""
        steps = self._unknown
        if self._different is None and steps and not self._differs(steps[-1]):
            # Equal again at the end: only looking at each of them tells.
            return next((step for step in steps[:-1] if self._differs(step)), None)
        low, high = 0, len(steps) if self._different is not None else len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._differs(steps[middle]) else (middle + 1, high)
        return steps[low] if 0 <= low < len(steps) else self._different

    def compared(self, step: int) -> Comparison:
        """All differences at a step; its tensors are read in full, once."""
        if step in self._compared:
            return self._compared[step]
        self.found.read.add(step)
        a, b = self._opened(step)
        with self._bar(f"step {step}") as start:
            told = start(bytes_to_compare(a, b, weights_only=self._weights_only))
            options: dict[str, Any] = {"weights_only": self._weights_only, "tolerance": self._tolerance}
            self._compared[step] = compare(a, b, **options, progress=told)
        return self._compared[step]

    def _differs(self, step: int) -> bool:
        self.found.read.add(step)
        a, b = self._opened(step)
        with self._bar(f"step {step}") as start:
            told = start(bytes_to_compare(a, b, weights_only=self._weights_only))
            return tensors_differ(a, b, weights_only=self._weights_only, tolerance=self._tolerance, progress=told)

    def _records_differ(self, a: StateReader, b: StateReader) -> bool:
        found = Comparison()
        compare_records(a, b, found, weights_only=self._weights_only, tolerance=self._tolerance)
        return bool(found.differences)

    def _opened(self, step: int) -> tuple[StateReader, StateReader]:
        return (
            open_any(self.found.a.steps[step], verify=self._verify),
            open_any(self.found.b.steps[step], verify=self._verify),
        )


def runs_report(runs: RunsComparison, *, everything: bool = False) -> Iterator[str]:
    """Lines on two runs: the first step that differs, then all that differs there; see `diff_report.report`."""
    yield f"{_sentence(runs)}."
    yield ""
    yield f"A: {_described(runs.a, runs.b)}"
    yield f"B: {_described(runs.b, runs.a)}"
    yield f"steps in common: {len(runs.steps)}, from {runs.steps[0]} to {runs.steps[-1]}"
    read = ", ".join(map(str, sorted(runs.read))) or "none"
    yield f"steps whose tensors were read: {read}; of others checksums in the manifests tell, or what differs before"
    if runs.found is not None:
        yield ""
        yield f"At step {runs.first}:"
        yield from report(runs.found, everything=everything, from_first_step=runs.before is None)


def _sentence(runs: RunsComparison) -> str:
    if runs.first is None:
        return f"The runs are equal at all {len(runs.steps)} steps that both have"
    since = f"The runs are equal at step {runs.before} and differ at step {runs.first}"
    if runs.before is None:
        since = f"The runs differ from the first step that both have, {runs.first}"
    if runs.first_of_tensors == runs.first:
        return since
    if runs.first_of_tensors is None:
        return f"{since}, in records beside the tensors alone; tensors are equal at all steps"
    return f"{since}, in records beside the tensors; tensors differ from step {runs.first_of_tensors} on"


def _described(run: Run, other: Run) -> str:
    alone = sorted(run.steps.keys() - other.steps.keys())
    facts = [f"{len(run.steps)} checkpoint(s)"]
    facts += [f"{len(alone)} of steps that the other lacks"] if alone else []
    facts += [f"not usable: {', '.join(run.unusable)}"] if run.unusable else []
    return f"{run.path} ({'; '.join(facts)})"


def runs_as_json(runs: RunsComparison) -> dict[str, Any]:
    """A comparison of runs for programs."""
    first = None if runs.found is None else as_json(runs.found, from_first_step=runs.before is None)
    return {
        "conclusion": f"{_sentence(runs)}.",
        "a": {"path": runs.a.path, "steps": sorted(runs.a.steps), "unusable": list(runs.a.unusable)},
        "b": {"path": runs.b.path, "steps": sorted(runs.b.steps), "unusable": list(runs.b.unusable)},
        "steps": runs.steps,
        "first": runs.first,
        "before": runs.before,
        "first_of_tensors": runs.first_of_tensors,
        "read": sorted(runs.read),
        "at_first": first,
    }
