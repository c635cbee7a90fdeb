"""The instructions of one rank as the executor carries them out: every one with its micro-batch and chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.schedule import PipeSchedule, TableSchedule

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
    """What one rank carries out in one batch.

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
        if kind not in _KNOWN:
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
    marked = set(ends.values())
    return [Order(o.instruction, o.micro_batch, o.chunk, i in marked) for i, o in enumerate(orders)]
