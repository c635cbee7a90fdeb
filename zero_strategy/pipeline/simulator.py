"""The schedule simulator: how long each action takes and when, as text, picture or trace.

A timeline is simulated, or measured in a run.

A measured timeline is a file of JSON lines, an event a line:

    {"rank": 0, "start": 0.0132, "end": 0.0310, "kind": "F", "micro_batch": 3, "chunk": 0, "step": 7}

`rank` is the pipeline rank; times are in seconds, of a clock that the ranks of a pipeline share; `kind` is F, B, I or W
for computations (`Kind`), and any other word for what else took time ("wait", "step"). `micro_batch`, `chunk` and
`step` may be left out where there are none. Lines may come in any order: files of several ranks are joined by putting
one after the other.

Ranks carry out their instructions in order. Computations take their time and wait for the messages that they need;
messages take the latency and nobody's time, as with an engine that posts receives in advance and does not wait for
sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zero_strategy.pipeline.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_ACTIVATION,
    RECV_GRAD,
    SEND_ACTIVATION,
    SEND_GRAD,
    PipeSchedule,
    Program,
    ScheduleError,
    TableSchedule,
    read_program,
)
from zero_strategy.pipeline.schedules import Kind
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.shown import shown

# Above the bound for texts: a run writes a line for each action of each step.
_MOST_BYTES = 4 << 30
"""Of a file of a timeline."""

_COMPUTES = frozenset(kind.value for kind in Kind)
# Not the input half: a micro-batch's activations are held until its weight half.
_ENDS = (Kind.BACKWARD.value, Kind.BACKWARD_WEIGHT.value)


@dataclass(frozen=True)
class Event:
    """Something that took a rank's time, from `start` to `end`."""

    rank: int
    start: float
    end: float
    kind: str
    """F, B, I or W (the values of Kind) for a computation; another word for anything else."""
    micro_batch: int | None = None
    chunk: int = 0
    step: int | None = None
    """Its number in the run, from 1; steps that were skipped (fp16) count."""

    @property
    def computes(self) -> bool:
        """True if the rank is busy with the model, and not with waiting or with the end of the batch."""
        return self.kind in _COMPUTES


@dataclass(frozen=True)
class Usage:
    """Times of a rank by activity, in the unit of the timeline.

    Attributes:
        start: When its first computation begins.
        end: When its last one ends.
        busy: How long it computes.
        idle: Fraction of the whole timeline in which it does not compute.
        idle_in_window: Fraction of its own time, from `start` to `end`, in which it does not.
        in_flight: The most micro-batches that are in flight at once: forward begun, backward not over. One in several
            chunks counts once.
        activations: The most activations that are held at once, in micro-batches of all chunks: those of one chunk
            count as 1 / chunks.
    """

    start: float
    end: float
    busy: float
    idle: float
    idle_in_window: float
    in_flight: int
    activations: float


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks.

    Attributes:
        name: Of what, for titles.
        ranks: How many.
        chunks: Stages of each.
        events: By rank, then by time.
        unit: Of the times: "s" where they were measured, else "".
    """

    name: str
    ranks: int
    chunks: int
    events: tuple[Event, ...]
    unit: str = ""

    @property
    def start(self) -> float:
        """Beginning of the first computation of all."""
        return min((event.start for event in self.events if event.computes), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the beginning of the first computation to the end of the last one."""
        return max((event.end for event in self.events if event.computes), default=0.0) - self.start

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that all ranks have computed something in."""
        # Not one that a rank has no computation of, as when a run was cut off: `usage` would refuse it.
        computed = [{e.step for e in self.computations(rank) if e.step is not None} for rank in range(self.ranks)]
        return sorted(set.intersection(*computed)) if computed else []

    def of_step(self, step: int) -> Timeline:
        """One step of a run; times begin at zero.

        Raises:
            ValueError: If there is no such step, or not on all ranks.
        """
        if step not in self.steps:
            raise ValueError(f"timeline {self.name}: there is no step {step}; there are {_ranges(self.steps)}")
        chosen = _from_zero([event for event in self.events if event.step == step])
        return replace(self, name=f"{self.name}, step {step}", events=tuple(chosen))

    @cached_property
    def usage(self) -> tuple[Usage, ...]:
        """Time in use of each rank.

        Raises:
            ValueError: If a rank computes nothing.
        """
        return tuple(self._usage(rank) for rank in range(self.ranks))

    def peak(self, rank: int, weight: Callable[[int], float]) -> float:
        """The most that a rank holds at once, if a micro-batch in flight in a chunk holds `weight(chunk)`."""
        held = peak = 0.0
        for event in self.computations(rank):
            if event.kind == Kind.FORWARD.value:
                held += weight(event.chunk)
                peak = max(peak, held)
            elif event.kind in _ENDS:
                held -= weight(event.chunk)
        return peak

    def computations(self, rank: int) -> list[Event]:
        """A rank's, by time."""
        return [event for event in self.events if event.rank == rank and event.computes]

    def _usage(self, rank: int) -> Usage:
        events = self.computations(rank)
        if not events:
            raise ValueError(f"timeline {self.name}: rank {rank} computes nothing")
        start, end = events[0].start, max(event.end for event in events)
        busy = sum(event.end - event.start for event in events)
        return Usage(
            start=start,
            end=end,
            busy=busy,
            idle=1 - busy / self.makespan,
            idle_in_window=1 - busy / (end - start),
            in_flight=_in_flight(events),
            activations=self.peak(rank, lambda _: 1) / self.chunks,
        )


def timeline_of(name: str, events: Iterable[Event], unit: str = "") -> Timeline:
    """A timeline of events in any order; `unit` of the times, if they are measured."""
    ordered = tuple(sorted(events, key=lambda event: (event.rank, event.start, event.end)))
    ranks = 1 + max((event.rank for event in ordered), default=-1)
    return Timeline(name, ranks, 1 + max((event.chunk for event in ordered), default=0), ordered, unit)


def read_timeline(paths: Sequence[str | Path]) -> Timeline:
    """The measured timeline in files of JSON lines, in the format above; times begin at zero.

    Raises:
        ValueError: If a line is no event; the message names file and line.
        OSError: If a file cannot be read.
    """
    events = [event for path in paths for event in _read(Path(path))]
    if not events:
        raise ValueError(f"{', '.join(map(str, paths))}: no events")
    return timeline_of(", ".join(Path(path).stem for path in paths), _from_zero(events), "s")


def _from_zero(events: Sequence[Event]) -> list[Event]:
    zero = min(event.start for event in events)
    return [replace(event, start=event.start - zero, end=event.end - zero) for event in events]


def _ranges(numbers: Sequence[int]) -> str:
    """1 to 4, 7: ascending numbers, runs of them together."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs) or "none"


def write_timeline(events: Iterable[Event], path: str | Path) -> None:
    """Write events as JSON lines.

    Raises:
        OSError: If the file cannot be written.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps({key: value for key, value in asdict(event).items() if value is not None}) + "\n")


def _in_flight(events: Sequence[Event]) -> int:
    held: dict[int | None, int] = {}
    peak = 0
    for event in events:
        if event.kind == Kind.FORWARD.value:
            held[event.micro_batch] = held.get(event.micro_batch, 0) + 1
            peak = max(peak, len(held))
        elif event.kind in _ENDS:
            # A file may begin inside of a step: an end without its forward changes nothing.
            held[event.micro_batch] = held.get(event.micro_batch, 1) - 1
            if not held[event.micro_batch]:
                del held[event.micro_batch]
    return peak


def _read(path: Path) -> list[Event]:
    events = []
    for number, line in enumerate(read_text(path, _MOST_BYTES).splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                events.append(_event(bounded_json.parse(line, where)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{shown(where)}: no event of a timeline: {type(error).__name__}: {error}") from error
    return events


def _event(record: Any) -> Event:
    if not isinstance(record, dict):
        raise TypeError("an event is an object")
    micro_batch, step = record.get("micro_batch"), record.get("step")
    event = Event(
        rank=int(record["rank"]),
        start=float(record["start"]),
        end=float(record["end"]),
        kind=str(record["kind"]),
        micro_batch=None if micro_batch is None else int(micro_batch),
        chunk=int(record.get("chunk", 0)),
        step=None if step is None else int(step),
    )
    if event.rank < 0 or event.chunk < 0 or event.end < event.start:
        raise ValueError("rank and chunk are 0 or more, and the end is not before the start")
    return event


PerStage = float | Sequence[float]
"""One time for all global stages, or one for each."""

_KINDS = {
    FORWARD: Kind.FORWARD.value,
    BACKWARD: Kind.BACKWARD.value,
    BACKWARD_INPUT: Kind.BACKWARD_INPUT.value,
    BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT.value,
}


@dataclass(frozen=True)
class Times:
    """Time of a micro-batch in a stage, in any unit: that of the result.

    Attributes:
        forward: The forward.
        backward: The input half of a backward.
        weight: The weight half.
        whole: A backward in one piece; None: the sum of its halves.
        latency: From the end of a computation to the arrival of its message.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage = 1.0
    whole: PerStage | None = None
    latency: float = 0.0

    def table(self, stages: int) -> dict[int, list[float]]:
        """A table of each stage by code of the computation.

        Raises:
            ValueError: If there is another number of times, or a negative one.
        """
        backward, weight = _per_stage("backward", self.backward, stages), _per_stage("weight", self.weight, stages)
        sums = [b + w for b, w in zip(backward, weight, strict=True)]
        _per_stage("latency", self.latency, stages)  # for its check alone
        return {
            FORWARD: _per_stage("forward", self.forward, stages),
            BACKWARD: sums if self.whole is None else _per_stage("whole", self.whole, stages),
            BACKWARD_INPUT: backward,
            BACKWARD_WEIGHT: weight,
        }


def simulate(schedules: Sequence[PipeSchedule], times: Times | None = None) -> Timeline:
    """The timeline of the schedules of all ranks; with times of one unit if none are given.

    Raises:
        ScheduleError: If the schedules wait for each other, or are not of all ranks of one pipeline.
        ValueError: If the times are not for this many stages.
    """
    program = read_program(schedules)
    times = Times() if times is None else times
    durations = times.table(program.placement.stages)
    runner = _Runner(program, durations, times.latency)
    runner.run()
    first = schedules[0]
    name = first.table.name if isinstance(first, TableSchedule) else type(first).__name__
    events = tuple(event for own in runner.events for event in own)
    return Timeline(name, len(schedules), program.placement.chunks, events)


class _Runner:
    """Carries out all ranks' instructions, each rank as far as it can get."""

    def __init__(self, program: Program, durations: dict[int, list[float]], latency: float) -> None:
        placement = program.placement
        self._program = program
        self._ops = [ops.tuples() for ops in program.ops]
        self._durations = durations
        self._latency = latency
        self._last = placement.stages - 1
        self._ranks = [placement.rank_of(stage) for stage in range(placement.stages)]
        self._times = [0.0] * placement.ranks
        self._next = [0] * placement.ranks
        # When what a computation needs is there: inputs, gradients of outputs, by stage and micro-batch.
        self._there: dict[tuple[int, int, int], float] = {}
        self._waiting: dict[tuple[int, int, int], int] = {}
        self.events: list[list[Event]] = [[] for _ in range(placement.ranks)]

    def run(self) -> None:
        """Simulate to the end.

        Raises:
            ScheduleError: If that cannot be reached.
        """
        able = list(range(len(self.events)))
        while able:
            # In any order: a rank's times depend on what it waits for, and not on when it is looked at.
            able += self._run(able.pop())
        stuck = [rank for rank, ops in enumerate(self._ops) if self._next[rank] < len(ops)]
        if stuck:
            waits = "; ".join(self._program.where(rank, self._next[rank]) for rank in stuck)
            raise ScheduleError(f"these wait for what is never sent: {waits}")

    def _run(self, rank: int) -> list[int]:
        """Carry out what the rank can; returns the ranks that were waiting for it."""
        woken: list[int] = []
        ops = self._ops[rank]
        while self._next[rank] < len(ops):
            code, stage, micro_batch, _ = ops[self._next[rank]]
            made = None
            if code <= BACKWARD_WEIGHT:
                need = self._needs(code, stage, micro_batch)
                if need is not None and need not in self._there:
                    self._waiting[need] = rank
                    return woken
                made = self._compute(rank, code, stage, micro_batch, 0.0 if need is None else self._there[need])
            elif code == SEND_ACTIVATION:
                made = (RECV_ACTIVATION, stage + 1, micro_batch)
                self._there[made] = self._times[rank] + self._latency
            elif code == SEND_GRAD:
                made = (RECV_GRAD, stage - 1, micro_batch)
                self._there[made] = self._times[rank] + self._latency
            # Receives, loads and the end of the batch take no time: it is computations that wait for what they need.
            self._next[rank] += 1
            if made in self._waiting:
                woken.append(self._waiting.pop(made))
        return woken

    def _needs(self, code: int, stage: int, micro_batch: int) -> tuple[int, int, int] | None:
        """Inputs of a computation that come from another stage."""
        if code == FORWARD and stage > 0:
            return RECV_ACTIVATION, stage, micro_batch
        if code in (BACKWARD, BACKWARD_INPUT) and stage < self._last:
            return RECV_GRAD, stage, micro_batch
        return None

    def _compute(self, rank: int, code: int, stage: int, micro_batch: int, ready: float) -> tuple[int, int, int] | None:
        """Compute; returns what is there by that for a neighbouring stage on the same rank."""
        start = max(self._times[rank], ready)
        end = self._times[rank] = start + self._durations[code][stage]
        chunk = self._program.placement.chunk_of(stage)
        self.events[rank].append(Event(rank, start, end, _KINDS[code], micro_batch, chunk))
        if code == BACKWARD_WEIGHT:
            return None
        to, kind = (stage + 1, RECV_ACTIVATION) if code == FORWARD else (stage - 1, RECV_GRAD)
        if not 0 <= to <= self._last or self._ranks[to] != rank:
            return None
        self._there[kind, to, micro_batch] = end
        return kind, to, micro_batch


def _per_stage(what: str, time: PerStage, stages: int) -> list[float]:
    times = list(time) if isinstance(time, Sequence) else [time] * stages
    if len(times) != stages:
        raise ValueError(f"{what}: {len(times)} times for {stages} stages")
    if any(not one >= 0 for one in times):  # a nan is not, either
        raise ValueError(f"{what}: times are zero or more, not {time}")
    return [float(one) for one in times]
