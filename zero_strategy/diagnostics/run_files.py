"""Files of a recorded run: facts, one line of JSON per step, and how they are read back.

    RUN_DIR/run.json           facts: config with origins, versions, ranks, device, model
    RUN_DIR/steps-0.jsonl      a line for each recorded step, one file per rank
    RUN_DIR/trace-0.jsonl      a line for each traced step: every interval of it, seconds since 1970
    RUN_DIR/beginnings.jsonl   of a run that survives deaths: a line for each beginning, by who is rank 0 then

Lines are written one by one, so what a run that was killed has recorded is there. A run that goes on in the same
directory appends; of two lines about a step the later one counts, and of two about a beginning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch

from zero_strategy.diagnostics.step_clock import Flow
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import is_there, read_text
from zero_strategy.survive.history import Beginning
from zero_strategy.version import __version__

_MOST_BYTES = 4 << 30
"""Of one rank's file of a run."""

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


_PACKAGES = ("torch", "lightning", "pytorch-lightning", "accelerate", "transformers")


def facts_of(engine: ZeroEngine) -> dict[str, Any]:
    """Plain types: `model`, `ranks`, `device`, `versions`, `config` (key, value, origin), `written`, `chosen`."""
    zero, mesh, device = engine.config.config, engine.mesh, engine.model.device
    parameters = list(engine.module.parameters())
    return {
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "model": {
            "class": type(engine.module).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "units": len(engine.model.units),
        },
        "ranks": {
            "world": mesh.world_group.world_size,
            "data parallel": mesh.world_size,
            "shard": mesh.shard_size,
            "replicate": mesh.world_size // mesh.shard_size,
            "pipeline stages": zero.pipeline.stages,
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "optimizers": [type(sharded.optimizer).__name__ for sharded in engine.optimizers],
        "program": Path(sys.argv[0]).name,
        "versions": {
            "zero_strategy": __version__,
            "Python": platform.python_version(),
            **{name: found for name in _PACKAGES if (found := _version(name))},
        },
        "config": [[key, str(setting.value), setting.origin] for key, setting in zero.settings()],
        "chosen": None if zero.chosen is None else dict(zero.chosen),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


PREFIX = "zero/"


@dataclass(frozen=True)
class MemorySample:
    """Bytes at the end of a step.

    Attributes:
        tiers: By tier and category of the ledger.
        resident: Of the process, in host memory.
        resident_peak: At most so far.
        allocated: By the allocator of the device; None on the CPU.
        allocated_peak: At most so far.
    """

    tiers: Mapping[str, Mapping[str, int]]
    resident: int
    resident_peak: int
    allocated: int | None = None
    allocated_peak: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        step: Optimizer steps taken with it.
        rank: Among all ranks that train the model.
        time: When it ended, in seconds since 1970.
        seconds: It took.
        parts: Seconds by part; they add up to `seconds`.
        flows: What moved, by kind.
        loss: Of this rank's micro-batches, their mean; None if nobody told it.
        tokens: Of this rank; None if inputs do not tell.
        samples: Likewise.
        operations: Floating-point operations of its forwards and backwards.
        peak: Operations that its device could have done in the time; None if that is not known.
        copies: Ranks that train on other data at the same time, this one included.
        memory: At its end, where it was looked at.
        experts: Rows for each expert of each layer, of the ranks that divide them with this one; on one of these.
    """

    step: int
    rank: int
    time: float
    seconds: float
    parts: Mapping[str, float]
    flows: Mapping[str, Flow] = field(default_factory=dict)
    loss: float | None = None
    tokens: int | None = None
    samples: int | None = None
    operations: int | None = None
    peak: float | None = None
    copies: int = 1
    memory: MemorySample | None = None
    experts: Mapping[str, Sequence[int]] | None = None

    @property
    def mfu(self) -> float | None:
        """Operations as a fraction of what the device could have done."""
        return None if self.operations is None or not self.peak else self.operations / self.peak

    def rate(self, count: float | None) -> float | None:
        """A rate per second of the step."""
        return None if count is None or self.seconds <= 0 else count / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain types; `from_json` reads them."""
        found = asdict(self)
        found["flows"] = {kind: flow._asdict() for kind, flow in self.flows.items()}
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepRecord:
        """The record of a line.

        Raises:
            KeyError, TypeError: If it is none.
        """
        kept = dict(values)
        kept["flows"] = {kind: Flow(**flow) for kind, flow in values.get("flows", {}).items()}
        if (memory := values.get("memory")) is not None:
            kept["memory"] = MemorySample(**memory)
        return cls(**kept)

    def metrics(self) -> dict[str, float]:
        """For a logger, by stable names; tokens, samples and operations are those of all ranks, if alike."""
        found: dict[str, float | None] = {"step_time/total": self.seconds}
        found |= {f"step_time/{part}": seconds for part, seconds in self.parts.items()}
        found["tokens_per_second"] = self.rate(None if self.tokens is None else self.tokens * self.copies)
        found["samples_per_second"] = self.rate(None if self.samples is None else self.samples * self.copies)
        operations = self.rate(self.operations)
        found["tflops_per_device"] = None if operations is None else operations / 1e12
        found["mfu"] = self.mfu
        for kind, flow in self.flows.items():
            found[f"bytes/{kind}"] = flow.nbytes
            rate = flow.bytes_per_second
            found[f"gigabytes_per_second/{kind}"] = None if rate is None else rate / 1e9
        if self.memory is not None:
            for tier, categories in self.memory.tiers.items():
                for category, nbytes in categories.items():
                    found[f"memory/{tier}/{category.replace(' ', '_')}"] = nbytes
            found["memory/resident"] = self.memory.resident
            found["memory/allocated"] = self.memory.allocated
            found["memory/allocated_peak"] = self.memory.allocated_peak
        return {PREFIX + name: float(value) for name, value in found.items() if value is not None}


FACTS, BEGINNINGS = "run.json", "beginnings.jsonl"


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

    def beginnings(self, beginnings: Sequence[Beginning]) -> None:
        """Append beginnings of a run that survives deaths; called by one rank at a time."""
        # Opened each time: they are few, and the next one may be another process's.
        with _open_for_lines(self.directory / BEGINNINGS) as file:
            file.writelines(json.dumps(each.to_json()) + "\n" for each in beginnings)

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
        beginnings: In order of time; none of a run that does not survive deaths.
    """

    directory: Path
    facts: Mapping[str, Any]
    steps: Mapping[int, Sequence[StepRecord]]
    traces: Mapping[int, Mapping[int, Sequence[Interval]]]
    beginnings: Sequence[Beginning] = ()

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
    facts = bounded_json.parse(read_text(folder / FACTS), str(folder / FACTS)) if is_there(folder / FACTS) else {}
    if not isinstance(facts, dict):
        raise ValueError(f"{folder / FACTS}: holds a JSON {type(facts).__name__}, not an object")
    return RecordedRun(
        folder,
        facts,
        {rank: [found[step] for step in sorted(found)] for rank, found in sorted(steps.items())},
        dict(sorted(traces.items())),
        _beginnings(folder / BEGINNINGS),
    )


def _beginnings(path: Path) -> list[Beginning]:
    found: dict[float, Beginning] = {}
    for values, where in _lines(path) if is_there(path) else ():
        try:
            one = Beginning.from_json(values)
            found[one.time] = one
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: no record of a beginning: {error}") from error
    return [found[time] for time in sorted(found)]


def _lines(path: Path) -> list[tuple[Any, str]]:
    found = []
    lines = read_text(path, _MOST_BYTES).splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            found.append((bounded_json.parse(line, where), where))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise error
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
