"""How long schedules take, if it is known how long a forward and the halves of a backward take.

Ranks carry out their instructions in order. Computations take their time and wait for the messages that they need;
messages take the latency and nobody's time, as with an engine that posts receives in advance and does not wait for
sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.opcodes import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_ACTIVATION,
    RECV_GRAD,
    SEND_ACTIVATION,
    SEND_GRAD,
)
from zero_strategy.pipeline.program import Program, ScheduleError, read_program
from zero_strategy.pipeline.schedule import PipeSchedule, TableSchedule
from zero_strategy.pipeline.timeline import Event, Timeline

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
    """How long a micro-batch takes in a stage, in any unit: that of the result.

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
        """By code of the computation, for each stage.

        Raises:
            ValueError: If there is another number of times, or a negative one.
        """
        backward, weight = _per_stage("backward", self.backward, stages), _per_stage("weight", self.weight, stages)
        sums = [b + w for b, w in zip(backward, weight, strict=True)]
        _per_stage("latency", self.latency, stages)
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
        """To the end.

        Raises:
            ScheduleError: If that cannot be reached.
        """
        able = list(range(len(self.events)))
        while able:
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
            self._next[rank] += 1
            if made in self._waiting:
                woken.append(self._waiting.pop(made))
        return woken

    def _needs(self, code: int, stage: int, micro_batch: int) -> tuple[int, int, int] | None:
        """What has to come from another stage before a computation."""
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
    if any(not one >= 0 for one in times):
        raise ValueError(f"{what}: times are zero or more, not {time}")
    return [float(one) for one in times]
