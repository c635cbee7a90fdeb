"""The files of a recorded run: who writes them, and how they are read back.

    RUN_DIR/run.json           facts: config with origins, versions, ranks, device, model
    RUN_DIR/steps-0.jsonl      a line for each recorded step, one file per rank
    RUN_DIR/trace-0.jsonl      a line for each traced step: every interval of it, seconds since 1970

Lines are written one by one, so what a run that was killed has recorded is there. A run that goes on in the same
directory appends; of two lines about a step the later one counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from zero_strategy.diagnostics.step_record import StepRecord

FACTS = "run.json"


class Interval(NamedTuple):
    """Something that a rank did.

    Attributes:
        name: What.
        row: Where it is drawn: "phase", "training", "pipeline" or a kind of transfer.
        begin, end: Seconds since 1970.
        detail: More of it, such as a unit's name.
    """

    name: str
    row: str
    begin: float
    end: float
    detail: str = ""


class RunWriter:
    """Writes the files of one rank.

    Args:
        directory: Made if it is missing. Another engine that writes here already has this one write below it.
        rank: Of this process.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        self.directory, self.rank = Path(directory), rank
        number = 1
        while (found := _open_alone(self.directory / f"steps-{rank}.jsonl")) is None:
            number += 1
            self.directory = Path(directory) / f"engine-{number}"
        self._steps: TextIO = found
        self._traces: TextIO | None = None

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Write what does not change."""
        (self.directory / FACTS).write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        """Append a step."""
        self._steps.write(json.dumps(record.to_json()) + "\n")

    def trace(self, step: int, intervals: Sequence[Interval]) -> None:
        """Append the intervals of a step."""
        if self._traces is None:
            self._traces = _open_for_lines(self.directory / f"trace-{self.rank}.jsonl")
        line = {"step": step, "rank": self.rank, "intervals": intervals}
        self._traces.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        if self._traces is not None:
            self._traces.close()


@dataclass(frozen=True)
class RecordedRun:
    """A run, read back.

    Attributes:
        directory: Where it is.
        facts: Of `run.json`; empty if there is none.
        steps: Records by rank, in order of steps.
        traces: Intervals by rank and step.
    """

    directory: Path
    facts: Mapping[str, Any]
    steps: Mapping[int, Sequence[StepRecord]]
    traces: Mapping[int, Mapping[int, Sequence[Interval]]]

    @cached_property
    def numbers(self) -> list[int]:
        """Steps that any rank has recorded, in order."""
        return sorted({record.step for records in self.steps.values() for record in records})


def read_run(directory: str | Path) -> RecordedRun:
    """Read the files of all ranks.

    Raises:
        ValueError: If there are none, or a line is damaged; names file and line. A last line that was cut off counts
            as not written.
    """
    folder = Path(directory)
    steps: dict[int, dict[int, StepRecord]] = {}
    for path in sorted(folder.glob("steps-*.jsonl")):
        for values, where in _lines(path):
            try:
                record = StepRecord.from_json(values)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{where}: no record of a step: {error}") from error
            steps.setdefault(record.rank, {})[record.step] = record
    if not steps:
        raise ValueError(
            f"{folder} holds no recorded steps (steps-RANK.jsonl): give the directory that diagnostics.run_dir named"
        )
    traces: dict[int, dict[int, list[Interval]]] = {}
    for path in sorted(folder.glob("trace-*.jsonl")):
        for values, where in _lines(path):
            try:
                found = [Interval(*one) for one in values["intervals"]]
                traces.setdefault(int(values["rank"]), {})[int(values["step"])] = found
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{where}: no trace of a step: {error}") from error
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8")) if (folder / FACTS).is_file() else {}
    return RecordedRun(
        folder,
        facts,
        {rank: [found[step] for step in sorted(found)] for rank, found in sorted(steps.items())},
        dict(sorted(traces.items())),
    )


def _lines(path: Path) -> list[tuple[Any, str]]:
    found = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            found.append((json.loads(line), where))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{where}: {error}") from error
    return found


def _open_for_lines(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (whole := path.read_bytes()) and not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])  # of a line that a killed run began
    return path.open("a", buffering=1, encoding="utf-8")


def _open_alone(path: Path) -> TextIO | None:
    """Opened for appending, unless somebody else has it open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:  # a file system without locks
            pass
    opened = _open_for_lines(path)
    with contextlib.suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened
