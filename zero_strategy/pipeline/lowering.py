"""From a table to instructions: messages, buffers, loads and the end of the batch.

The rows are run with times of one unit for a forward or half a backward. What happens at one time is put in one order:
messages, then computations. A message appears at that place in the instructions of both its ranks, when what it carries
has been computed. So messages between two ranks have one order on both sides; and whichever instruction comes first in
the common order can be carried out, even if sending waits for the receiver: there is no deadlock.

A buffer holds a micro-batch of a chunk from its receive, load or forward until its backward (all halves) is done and
sent; in inference until its output is. Between two chunks of one rank nothing is sent: a forward takes the outputs, and
a backward the gradients, that the neighbouring chunk of the same micro-batch has made.
"""

from __future__ import annotations

from heapq import heappop, heappush

from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from zero_strategy.pipeline.schedule import TableSchedule
from zero_strategy.pipeline.tables import Table

# What happens on a rank, by code.
_CLASSES: tuple[type[BufferOpInstruction], ...] = (
    ForwardPass,
    BackwardPass,
    BackwardInput,
    BackwardWeight,
    SendActivation,
    RecvActivation,
    SendGrad,
    RecvGrad,
)
_FORWARD, _BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT = 0, 1, 2, 3
_SEND_ACTIVATION, _RECV_ACTIVATION, _SEND_GRAD, _RECV_GRAD = 4, 5, 6, 7
_CODES = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: _BACKWARD_WEIGHT,
}
_DURATIONS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def lower(table: Table) -> tuple[TableSchedule, ...]:
    """The instructions of every rank of a table.

    Raises:
        ValueError: If the rows wait for each other; the message names rank and action.
    """
    events = _run(table)
    return tuple(_instructions(table, rank, sorted(events[rank])) for rank in range(table.ranks))


def _run(table: Table) -> list[list[int]]:
    """Per rank what happens there, each as one number: time, message or computation, sender's stage and micro-batch,
    code. Their order is the same on both sides of every message."""
    placement, micro_batches = table.placement, table.micro_batches
    last, places = placement.stages - 1, placement.stages * table.micro_batches
    ranks_of = [placement.rank_of(stage) for stage in range(placement.stages)]
    forwarded, returned = [-1] * places, [-1] * places  # when outputs, and gradients of inputs, are there
    waiting: dict[int, int] = {}
    events: list[list[int]] = [[] for _ in table.rows]
    next_action, times = [0] * table.ranks, [0] * table.ranks
    able = list(range(table.ranks))
    while able:
        rank = able.pop()
        row, mine, time, at = table.rows[rank], events[rank], times[rank], next_action[rank]
        stages = [placement.stage_of(rank, chunk) for chunk in range(table.chunks)]
        while at < len(row):
            kind, micro_batch, chunk = row[at]
            stage = stages[chunk]
            place = stage * micro_batches + micro_batch
            ready = 0
            if kind is Kind.FORWARD:
                if stage:
                    needed, ready = place - micro_batches, forwarded[place - micro_batches]
            elif kind is Kind.BACKWARD_WEIGHT:
                needed, ready = places + place, returned[place]
            elif stage < last:
                needed, ready = places + place + micro_batches, returned[place + micro_batches]
            else:
                needed, ready = place, forwarded[place]
            if ready < 0:
                waiting[needed] = rank
                break
            at += 1
            time = max(time, ready)
            mine.append((time * 2 + 1) * places * 8 + place * 8 + _CODES[kind])
            time += _DURATIONS[kind]
            if kind is Kind.FORWARD:
                forwarded[place] = time
                made, to, code = place, stage + 1, _SEND_ACTIVATION
            elif kind is Kind.BACKWARD_WEIGHT:
                continue
            else:
                returned[place] = time
                made, to, code = places + place, stage - 1, _SEND_GRAD
            if 0 <= to <= last and ranks_of[to] != rank:
                message = time * 2 * places * 8 + place * 8 + code
                mine.append(message)
                events[ranks_of[to]].append(message + 1)
            if made in waiting:
                able.append(waiting.pop(made))
        times[rank], next_action[rank] = time, at
    for rank, row in enumerate(table.rows):
        if next_action[rank] < len(row):
            raise ValueError(f"schedule {table.name}: {_stuck(table, next_action)}")
    return events


def _stuck(table: Table, next_action: list[int]) -> str:
    """Who waits with which action, in words."""
    waits = [
        f"rank {rank} at its action {at} ({row[at]})"
        for rank, (row, at) in enumerate(zip(table.rows, next_action, strict=True))
        if at < len(row)
    ]
    return "these wait for each other, or for what comes later in their own row: " + ", ".join(waits)


def _instructions(table: Table, rank: int, events: list[int]) -> TableSchedule:
    """A rank's events as instructions, with buffers."""
    micro_batches, ranks, last = table.micro_batches, table.ranks, table.placement.stages - 1
    space = table.placement.stages * micro_batches * 8
    held: dict[int, int] = {}  # buffer by stage and micro-batch
    free: list[int] = []
    sending: set[int] = set()  # whose buffer is free as soon as its gradient, or in inference its output, is sent
    ends, sends = (_FORWARD, _SEND_ACTIVATION) if table.forward_only else (_BACKWARD, _SEND_GRAD)
    leaves = {stage for stage in range(last + 1) if _leaves(table, stage)}
    buffers = 0
    instructions: list[PipeInstruction] = []
    for event in events:
        place, code = divmod(event % space, 8)
        if code == _RECV_ACTIVATION:
            place += micro_batches
        elif code == _RECV_GRAD:
            place -= micro_batches
        stage, micro_batch = divmod(place, micro_batches)
        chunk = stage // ranks
        if place in held:
            buffer = held[place]
        elif free:
            buffer = held[place] = heappop(free)
        else:
            buffer = held[place] = buffers
            buffers += 1
        if code == _FORWARD and (stage == 0 or stage == last):
            instructions.append(LoadMicroBatch(buffer, micro_batch=micro_batch, chunk=chunk))
        instructions.append(_CLASSES[code](buffer, micro_batch=micro_batch, chunk=chunk))
        if code == ends and stage in leaves:
            sending.add(place)
        elif code in (ends, _BACKWARD_WEIGHT) or (code == sends and place in sending):
            heappush(free, held.pop(place))
    assert not held, held
    if not table.forward_only:
        instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
    return TableSchedule(table, rank, instructions, buffers)


def _leaves(table: Table, stage: int) -> bool:
    """Whether what a stage makes last of a micro-batch goes to another rank: its gradient; in inference its output."""
    placement, to = table.placement, stage + 1 if table.forward_only else stage - 1
    return 0 <= to < placement.stages and placement.rank_of(to) != placement.rank_of(stage)
