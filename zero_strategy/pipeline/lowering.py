"""Lowering of a schedule's table to the instructions of each rank: messages, buffers, loads and the end of the batch.

The rows are run with times of one unit for a forward or half a backward. What happens at one time is put in one order:
messages, then computations. A message appears at that place in the instructions of both its ranks, when what it carries
has been computed. So messages between two ranks have one order on both sides; and whichever instruction comes first in
the common order can be carried out, even if sending waits for the receiver: there is no deadlock.

A buffer holds a micro-batch of a chunk from its first instruction, a receive or load, to its last: in training the end
of its backward, or the sending of its gradient. Between two chunks of one rank nothing is sent: a forward takes the
outputs, and a backward the gradients, that the neighbouring chunk of the same micro-batch has made; in inference the
buffer that they were made in may have been taken again by then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from zero_strategy.pipeline.check import check as check  # its former place
from zero_strategy.pipeline.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOAD,
    RECV_ACTIVATION,
    RECV_GRAD,
    SEND_ACTIVATION,
    SEND_GRAD,
    TAIL,
    TAIL_CLASSES,
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    Numbers,
    Ops,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TableSchedule,
)
from zero_strategy.pipeline.schedules import Kind, Placement, Table

_DURATIONS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
_MESSAGE, _LOAD, _COMPUTE = 0, 1, 2
"""The order of what happens at one time."""


def lower(table: Table) -> tuple[TableSchedule, ...]:
    """The instructions of every rank of a table.

    Raises:
        ValueError: If the rows wait for each other; the message names rank and action.
    """
    events = _events(table, _run(table))
    buffer, buffers = _buffers(table, events)
    stage, micro_batch = np.divmod(events.place, table.micro_batches)
    # Inference has nothing to reduce or to step.
    tail = np.arange(TAIL, TAIL + len(TAIL_CLASSES) * (not table.forward_only))
    bounds = np.searchsorted(events.rank, np.arange(table.ranks + 1)).tolist()
    schedules = []
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        columns = (np.append(column[start:stop], np.full_like(tail, -1)) for column in (stage, micro_batch, buffer))
        ops = Ops(np.append(events.code[start:stop], tail), *columns)
        schedules.append(TableSchedule(table, rank, ops, buffers[rank]))
    return tuple(schedules)


def _run(table: Table) -> Numbers:
    """Times at which computations end, -1 where there is none: [forward; whole backward or input half; weight half] x
    [stage and micro-batch]. Ranks get on by turns, each as far as it can."""
    places = table.placement.stages * table.micro_batches
    ends = [-1] * (3 * places)
    plans = [_plan(table, rank) for rank in range(table.ranks)]
    next_action, times = [0] * table.ranks, [0] * table.ranks
    # One rank for each end is enough, that of the neighbouring stage: a rank that waits for an end of its own is stuck.
    waiting: dict[int, int] = {}
    able = list(range(table.ranks - 1, -1, -1))
    while able:
        rank = able.pop()
        row, time, plan = table.rows[rank], times[rank], plans[rank]
        at = next_action[rank]
        while at < len(row):
            kind, micro_batch, chunk = row[at]
            needs, makes, duration = plan[chunk][kind]
            if needs >= 0:
                ready = ends[needs + micro_batch]
                if ready < 0:
                    waiting[needs + micro_batch] = rank
                    break
                if ready > time:
                    time = ready
            time += duration
            made = makes + micro_batch
            ends[made] = time
            if made in waiting:
                able.append(waiting.pop(made))
            at += 1
        times[rank], next_action[rank] = time, at
    if any(at < len(row) for at, row in zip(next_action, table.rows)):
        raise ValueError(f"schedule {table.name}: {_stuck(table, next_action)}")
    return np.array(ends).reshape(3, places)


def _plan(table: Table, rank: int) -> list[dict[Kind, tuple[int, int, int]]]:
    """Per chunk and kind: where in `ends` its need is (-1: none) and its own end goes, and its duration."""
    micro_batches, last = table.micro_batches, table.placement.stages - 1
    places = (last + 1) * micro_batches
    plan = []
    for chunk in range(table.chunks):
        stage = table.placement.stage_of(rank, chunk)
        own = stage * micro_batches
        gradient = places + own + micro_batches if stage < last else own  # The last stage's comes from its own forward
        needs = {
            Kind.FORWARD: own - micro_batches if stage else -1,
            Kind.BACKWARD: gradient,
            Kind.BACKWARD_INPUT: gradient,
            Kind.BACKWARD_WEIGHT: places + own,
        }
        makes = {
            Kind.FORWARD: own,
            Kind.BACKWARD: places + own,
            Kind.BACKWARD_INPUT: places + own,
            Kind.BACKWARD_WEIGHT: 2 * places + own,
        }
        plan.append({kind: (needs[kind], makes[kind], _DURATIONS[kind]) for kind in Kind})
    return plan


def _stuck(table: Table, next_action: list[int]) -> str:
    """Ranks that wait, with their actions, in words."""
    waits = [
        f"rank {rank} at its action {at} ({row[at]})"
        for rank, (row, at) in enumerate(zip(table.rows, next_action))
        if at < len(row)
    ]
    return "these wait for each other, or for what comes later in their own row: " + ", ".join(waits)


@dataclass(frozen=True)
class _Events:
    """Events by rank, and then in the common order."""

    rank: Numbers
    code: Numbers
    place: Numbers
    """Stage x micro-batches + micro-batch, on this rank."""


def _events(table: Table, ends: Numbers) -> _Events:
    placement, micro_batches = table.placement, table.micro_batches
    stages = placement.stages
    rank_of = np.array([placement.rank_of(stage) for stage in range(stages)])
    forward, backward, weight = ends
    place = np.arange(stages * micro_batches)
    stage = place // micro_batches
    rank = rank_of[stage]
    halves = weight >= 0
    whole, parts = (backward >= 0) & ~halves, (backward >= 0) & halves
    # Indices of a stage that is none are clipped here, or wrap around; the first condition leaves their places out.
    down = (stage < stages - 1) & (rank_of[np.minimum(stage + 1, stages - 1)] != rank)
    up = (stage > 0) & (rank_of[stage - 1] != rank) & (backward >= 0)
    outer = (stage == 0) | (stage == stages - 1)
    # Computations stand where they begin, and messages where what they carry has ended.
    # Which places; time; what comes first of what happens at one time; code; how many stages on.
    tables = (
        (np.full_like(halves, True), forward - 1, _COMPUTE, FORWARD, 0),
        (outer, forward - 1, _LOAD, LOAD, 0),
        (whole, backward - 2, _COMPUTE, BACKWARD, 0),
        (parts, backward - 1, _COMPUTE, BACKWARD_INPUT, 0),
        (halves, weight - 1, _COMPUTE, BACKWARD_WEIGHT, 0),
        (down, forward, _MESSAGE, SEND_ACTIVATION, 0),
        (down, forward, _MESSAGE, RECV_ACTIVATION, 1),
        (up, backward, _MESSAGE, SEND_GRAD, 0),
        (up, backward, _MESSAGE, RECV_GRAD, -1),
    )
    codes = np.concatenate([np.full(np.count_nonzero(where), code) for where, _, _, code, _ in tables])
    senders = np.concatenate([place[where] for where, *_ in tables])
    moves = np.concatenate([np.full(np.count_nonzero(where), move) for where, *_, move in tables])
    times = np.concatenate([3 * time[where] + order for where, time, order, _, _ in tables])
    here = senders + moves * micro_batches
    ranks = rank_of[here // micro_batches]
    # Messages of one time are in the order of their senders' places: the same on both sides.
    longest = int(times.max()) + 1
    order = np.argsort((ranks * longest + times) * len(place) + senders, kind="stable")
    return _Events(ranks[order], codes[order], here[order])


def _buffers(table: Table, events: _Events) -> tuple[Numbers, list[int]]:
    """The buffer of each event, and how many each rank has. A place has one from its first event to its last; of those
    that are free it takes the lowest."""
    places = table.placement.stages * table.micro_batches
    numbers = np.arange(len(events.place))
    first, last = np.empty(places, dtype=np.int64), np.empty(places, dtype=np.int64)
    first[events.place[::-1]] = numbers[::-1]  # Backwards, as NumPy keeps the last of several values for one index
    last[events.place] = numbers
    ranks = events.rank[first].tolist()
    free: list[list[int]] = [[] for _ in range(table.ranks)]
    buffers = [0] * table.ranks
    held = [0] * places
    # Odd numbers are ends: where a place has one event only, it takes its buffer before it gives it back.
    for change in np.argsort(np.concatenate([2 * first, 2 * last + 1])).tolist():
        if change >= places:
            place = change - places
            heappush(free[ranks[place]], held[place])
            continue
        rank = ranks[change]
        if free[rank]:
            held[change] = heappop(free[rank])
        else:
            held[change] = buffers[rank]
            buffers[rank] += 1
    return np.array(held)[events.place], buffers


KINDS: dict[type[PipeInstruction], Kind] = {
    ForwardPass: Kind.FORWARD,
    BackwardPass: Kind.BACKWARD,
    BackwardInput: Kind.BACKWARD_INPUT,
    BackwardWeight: Kind.BACKWARD_WEIGHT,
}
_KNOWN = {*KINDS, LoadMicroBatch, SendActivation, RecvActivation, SendGrad, RecvGrad} | {
    ReduceTiedGrads,
    ReduceGrads,
    OptimizerStep,
}


@dataclass(frozen=True)
class Order:
    """An instruction.

    Attributes:
        instruction: Its class.
        micro_batch: -1 where it is about none.
        chunk: Of the rank.
        last: No later instruction of this batch adds gradients to the chunk's parameters.
    """

    instruction: type[PipeInstruction]
    micro_batch: int
    chunk: int
    last: bool = False


@dataclass(frozen=True)
class Orders:
    """Actions of one rank in one batch.

    Attributes:
        schedule: Where they are from.
        orders: In order.
        training: Whether there are backwards.
        receives: How many messages come, by instruction and chunk.
        title: Of the whole, equal on all ranks that run the same.
    """

    schedule: PipeSchedule
    orders: tuple[Order, ...]
    training: bool
    receives: Counter[tuple[type[PipeInstruction], int]]
    title: str


def read_orders(schedule: PipeSchedule, placement: Placement, rank: int) -> Orders:
    """The orders in a schedule. Where instructions name no micro-batch, each kind counts its own.

    Raises:
        ValueError: If the schedule is for another rank or placement, or has unknown instructions.
    """
    is_table = isinstance(schedule, TableSchedule)
    of = schedule.table.placement if isinstance(schedule, TableSchedule) else Placement(schedule.stages)
    if of != placement or schedule.stage_id != rank:
        raise ValueError(
            f"the schedule is for rank {schedule.stage_id} of {of}, but this is rank {rank} of {placement}"
        )
    steps = [schedule.instructions] if isinstance(schedule, TableSchedule) else schedule.steps()
    seen: Counter[type[PipeInstruction]] = Counter()
    receives: Counter[tuple[type[PipeInstruction], int]] = Counter()
    orders: list[Order] = []
    for instruction in (one for step in steps for one in step):
        kind = type(instruction)
        if kind not in _KNOWN:  # By the very class: what a subclass means is unknown here
            raise ValueError(f"the schedule has an instruction that the executor does not know: {instruction!r}")
        if not isinstance(instruction, BufferOpInstruction):
            orders.append(Order(kind, -1, 0))
            continue
        micro_batch = instruction.micro_batch
        if micro_batch is None:
            micro_batch = seen[kind]
            seen[kind] += 1
        if kind in (RecvActivation, RecvGrad):
            receives[kind, instruction.chunk] += 1
        orders.append(Order(kind, micro_batch, instruction.chunk))
    training = any(KINDS.get(order.instruction, Kind.FORWARD) is not Kind.FORWARD for order in orders)
    name = schedule.table.name if isinstance(schedule, TableSchedule) else type(schedule).__name__
    title = f"{name} {placement} {schedule.micro_batches} {training} {is_table}"
    return Orders(schedule, tuple(_with_last(orders)), training, receives, title)


def _with_last(orders: list[Order]) -> list[Order]:
    """Marks, for each chunk, what adds gradients last."""
    ends = {order.chunk: i for i, order in enumerate(orders) if order.instruction in (BackwardPass, BackwardWeight)}
    # The last in a rank's order, which need not be that of the last micro-batch.
    marked = set(ends.values())
    return [Order(o.instruction, o.micro_batch, o.chunk, i in marked) for i, o in enumerate(orders)]
