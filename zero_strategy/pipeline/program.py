"""Instructions of all ranks as numbers, for what looks at whole pipelines: the checker and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = 0, 1, 2, 3
SEND_ACTIVATION, RECV_ACTIVATION, SEND_GRAD, RECV_GRAD, LOAD = 4, 5, 6, 7, 8
TAIL = 9
"""This code and those after it have no buffer: they end the batch, in this order."""

CODES: dict[type[PipeInstruction], int] = {
    ForwardPass: FORWARD,
    BackwardPass: BACKWARD,
    BackwardInput: BACKWARD_INPUT,
    BackwardWeight: BACKWARD_WEIGHT,
    SendActivation: SEND_ACTIVATION,
    RecvActivation: RECV_ACTIVATION,
    SendGrad: SEND_GRAD,
    RecvGrad: RECV_GRAD,
    LoadMicroBatch: LOAD,
    ReduceTiedGrads: TAIL,
    ReduceGrads: TAIL + 1,
    OptimizerStep: TAIL + 2,
}


class ScheduleError(ValueError):
    """Instructions that cannot be carried out, or would compute something else. Names rank, step and instruction."""


Op = tuple[int, int, int, int]
"""An instruction: its code, the global stage and micro-batch that it is about, and its buffer."""


@dataclass(frozen=True)
class Program:
    """The schedules of all ranks of a pipeline, and what they say.

    Attributes:
        schedules: One for each rank, in order.
        placement: Where the stages are.
        micro_batches: How many there are.
        ops: Per rank, as they are carried out.
    """

    schedules: tuple[PipeSchedule, ...]
    placement: Placement
    micro_batches: int
    ops: tuple[list[Op], ...]

    def error(self, rank: int, at: int, what: str) -> ScheduleError:
        """The error that says `what` about the instruction `at` of a rank."""
        return ScheduleError(f"{self.where(rank, at)}: {what}")

    def where(self, rank: int, at: int) -> str:
        """The instruction `at` of a rank, in words."""
        if at >= len(self.ops[rank]):
            return f"rank {rank} at its end"
        seen = 0
        for number, step in enumerate(self.schedules[rank].steps()):
            if at < seen + len(step):
                return f"rank {rank}, step {number}, {step[at - seen]!r}"
            seen += len(step)
        raise AssertionError((rank, at))


def read_program(schedules: Sequence[PipeSchedule]) -> Program:
    """Read the schedules of all ranks.

    Micro-batches of instructions that name none, which DeepSpeed's do not, are counted per kind of instruction.

    Raises:
        ScheduleError: If the schedules are not of all ranks of one pipeline, or have unknown instructions.
    """
    if not schedules:
        raise ScheduleError("there are no schedules")
    first = schedules[0]
    placement = first.table.placement if isinstance(first, TableSchedule) else Placement(first.stages)
    for rank, schedule in enumerate(schedules):
        of = (schedule.stages, schedule.stage_id, schedule.micro_batches)
        if of != (len(schedules), rank, first.micro_batches):
            found = f"schedule {rank} of {len(schedules)} is for stage {of[1]} of {of[0]} and {of[2]} micro-batches"
            wanted = f"one for every rank, in order, all for {first.micro_batches} micro-batches like the first"
            raise ScheduleError(f"{found}; needed is {wanted}")
    ops = tuple(_read(schedule, placement) for schedule in schedules)
    return Program(tuple(schedules), placement, first.micro_batches, ops)


def _read(schedule: PipeSchedule, placement: Placement) -> list[Op]:
    stages = [placement.stage_of(schedule.stage_id, chunk) for chunk in range(placement.chunks)]
    counts = [0] * len(CODES)
    ops: list[Op] = []
    if isinstance(schedule, TableSchedule):
        instructions: Sequence[PipeInstruction] = schedule.instructions
    else:
        instructions = [instruction for step in schedule.steps() for instruction in step]
    for instruction in instructions:
        code = CODES.get(type(instruction), -1)
        if code < 0:
            raise ScheduleError(f"rank {schedule.stage_id}: {instruction!r} is no instruction that can be checked")
        if isinstance(instruction, BufferOpInstruction):
            micro_batch = instruction.micro_batch
            if micro_batch is None:
                micro_batch = counts[code]
                counts[code] += 1
            ops.append((code, stages[instruction.chunk], micro_batch, instruction.buffer_id))
        else:
            ops.append((code, -1, -1, -1))
    return ops
