"""The instructions of all ranks of a pipeline together, for what looks at whole pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero_strategy.pipeline.instructions import BufferOpInstruction, PipeInstruction
from zero_strategy.pipeline.opcodes import BUFFER_CLASSES, TAIL_CLASSES, Ops
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.schedule import PipeSchedule, TableSchedule

_CODES: dict[type[PipeInstruction], int] = {
    instruction: code for code, instruction in enumerate((*BUFFER_CLASSES, *TAIL_CLASSES))
}


class ScheduleError(ValueError):
    """Instructions that cannot be carried out, or would compute something else. Names rank, step and instruction."""


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
    ops: tuple[Ops, ...]

    def error(self, rank: int, at: int, what: str) -> ScheduleError:
        """The error that says `what` about the instruction `at` of a rank."""
        return ScheduleError(f"{self.where(rank, at)}: {what}")

    def where(self, rank: int, at: int) -> str:
        """The instruction `at` of a rank, in words."""
        seen = 0
        for number, step in enumerate(self.schedules[rank].steps()):
            if at < seen + len(step):
                return f"rank {rank}, step {number}, {step[at - seen]!r}"
            seen += len(step)
        return f"rank {rank} at its end"


def read_program(schedules: Sequence[PipeSchedule]) -> Program:
    """Read the schedules of all ranks.

    Raises:
        ScheduleError: If the schedules are not of all ranks of one pipeline, or have unknown instructions.
    """
    if not schedules:
        raise ScheduleError("there are no schedules")
    first = schedules[0]
    for rank, schedule in enumerate(schedules):
        of = (schedule.stages, schedule.stage_id, schedule.micro_batches)
        if of != (len(schedules), rank, first.micro_batches) or schedule.placement != first.placement:
            found = f"schedule {rank} of {len(schedules)} is for stage {of[1]} of {of[0]} and {of[2]} micro-batches"
            wanted = f"one for every rank, in order, all for {first.micro_batches} micro-batches like the first"
            raise ScheduleError(f"{found}; needed is {wanted}, and with stages placed alike")
    ops = tuple(s.ops if isinstance(s, TableSchedule) else read_ops(s) for s in schedules)
    return Program(tuple(schedules), first.placement, first.micro_batches, ops)


def read_ops(schedule: PipeSchedule) -> Ops:
    """What a schedule's instructions say.

    Micro-batches of instructions that name none, which DeepSpeed's do not, are counted per kind of instruction.

    Raises:
        ScheduleError: If there is an unknown instruction.
    """
    placement, rank = schedule.placement, schedule.stage_id
    counts = [0] * len(_CODES)
    ops: list[tuple[int, int, int, int]] = []
    for step in schedule.steps():
        for instruction in step:
            code = _CODES.get(type(instruction), -1)
            if code < 0:
                raise ScheduleError(f"rank {rank}: {instruction!r} is no instruction that can be checked")
            if not isinstance(instruction, BufferOpInstruction):
                ops.append((code, -1, -1, -1))
                continue
            micro_batch, chunk = instruction.micro_batch, instruction.chunk
            if micro_batch is None:
                micro_batch, counts[code] = counts[code], counts[code] + 1
            if not (0 <= micro_batch < schedule.micro_batches and 0 <= chunk < placement.chunks):
                there = f"there are {schedule.micro_batches} micro-batches and {placement.chunks} chunks"
                found = f"this is micro-batch {micro_batch} in chunk {chunk}"
                raise ScheduleError(f"rank {rank}, {instruction!r}: {there}, {found}")
            ops.append((code, placement.stage_of(rank, chunk), micro_batch, instruction.buffer_id))
    return Ops(*np.array(ops, dtype=np.int64).reshape(-1, 4).T)
