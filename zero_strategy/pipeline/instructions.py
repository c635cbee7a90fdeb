"""Instructions of a pipeline engine: DeepSpeed's, backwards in halves, and schedules made of them.

DeepSpeed's instructions, and two for backwards in halves.

Instructions of a lowered table carry `buffer_id`, `micro_batch` and `chunk`. Those of DeepSpeed's schedules carry
`buffer_id` only: micro-batches come in order there, and a rank has one stage.

`TrainSchedule`, `InferenceSchedule` and `DataParallelSchedule` generate what DeepSpeed's classes of these names do,
instruction for instruction. `TableSchedule` is one rank's part of a lowered table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_strategy.pipeline.schedules import Placement, Table


class PipeInstruction:
    """Anything that a schedule asks of a rank; the keywords become members."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = self.__class__.__name__
        self.kwargs = kwargs
        self.__dict__.update(kwargs)  # As members, since schedules written for DeepSpeed read them there

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Step the optimizer and zero the gradients. Comes after both reductions; data-parallel ranks may meet in it."""


class ReduceGrads(PipeInstruction):
    """Reduce the stage's gradients among its data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied parameters among the stages that hold them.

    Only the model tells which stages those are, so a schedule must place it where all of them may meet.
    """


class BufferOpInstruction(PipeInstruction):
    """An instruction about the buffer number `buffer_id` of the rank."""

    buffer_id: int
    micro_batch: int | None = None
    """Which micro-batch of the step; None in DeepSpeed's schedules."""
    chunk: int = 0
    """Which of the rank's stages."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch from the data: the first stage its inputs, the last stage its labels."""


class ForwardPass(BufferOpInstruction):
    """Run the stage on the buffer's inputs; outputs stay in the buffer."""


class BackwardPass(BufferOpInstruction):
    """Run the stage's backward from the buffer's output gradients (from the loss, in the last stage)."""


class BackwardInput(BufferOpInstruction):
    """The first half of a backward: gradients of the stage's inputs only, which the stage before waits for."""


class BackwardWeight(BufferOpInstruction):
    """The second half, any time after the first: gradients of the stage's parameters."""


class SendActivation(BufferOpInstruction):
    """Send the buffer's outputs to the next stage, which has a RecvActivation for it."""


class RecvActivation(BufferOpInstruction):
    """Receive the buffer's inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the buffer's inputs to the stage before, which has a RecvGrad for it.

    Inputs that need no gradient have none, which arrives there as None.
    """


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the buffer's outputs from the next stage."""


Numbers = NDArray[np.int64]

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = 0, 1, 2, 3
SEND_ACTIVATION, RECV_ACTIVATION, SEND_GRAD, RECV_GRAD, LOAD = 4, 5, 6, 7, 8
BUFFER_CLASSES: tuple[type[BufferOpInstruction], ...] = (
    ForwardPass,
    BackwardPass,
    BackwardInput,
    BackwardWeight,
    SendActivation,
    RecvActivation,
    SendGrad,
    RecvGrad,
    LoadMicroBatch,
)
"""By code."""
TAIL = len(BUFFER_CLASSES)
"""This code and those after it are of no micro-batch: they end the batch, in this order."""
TAIL_CLASSES: tuple[type[PipeInstruction], ...] = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


@dataclass(frozen=True)
class Ops:
    """Instructions of a rank, in order, as four arrays of one length.

    Attributes:
        code: Which one.
        stage: The global stage that it is about; -1 in the tail, like what follows.
        micro_batch: And the micro-batch.
        buffer: Its buffer.
    """

    code: Numbers
    stage: Numbers
    micro_batch: Numbers
    buffer: Numbers

    def __len__(self) -> int:
        return len(self.code)

    def tuples(self) -> list[tuple[int, int, int, int]]:
        """(code, stage, micro-batch, buffer) of each."""
        columns = (self.code, self.stage, self.micro_batch, self.buffer)
        return list(zip(*(column.tolist() for column in columns)))


class PipeSchedule(ABC):
    """The instructions of one pipeline rank for one batch.

    A schedule is an iterator over its steps; `iter()` starts it anew.

    Args:
        micro_batches: How many micro-batches make the batch.
        stages: How many ranks the pipeline has.
        stage_id: Which of them this is.

    Raises:
        ValueError: If there are no micro-batches, or no such stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1:
            raise ValueError(f"a schedule needs at least one micro-batch, not {micro_batches}")
        if not 0 <= stage_id < stages:
            raise ValueError(f"stage {stage_id} is none of a pipeline of {stages} stages")
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._under_way: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Number of buffers that the instructions use; a schedule that needs fewer than one per micro-batch says so."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Rank of the pipeline that this is for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of ranks in the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in the batch."""
        return self.micro_batches

    @property
    def placement(self) -> Placement:
        """Placement of the stages: one on each rank."""
        return Placement(self.stages)

    @property
    def is_first_stage(self) -> bool:
        """True if the rank takes the model's inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the rank makes the model's outputs."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Micro-batches take the buffers in turn."""
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self._under_way = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._under_way is None:
            self._under_way = self.steps()
        return next(self._under_way)


class TrainSchedule(PipeSchedule):
    """1F1B as DeepSpeed has it: forwards and backwards alternate, each stage one step behind the one before it."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """2 x (micro-batches + stages - 1) steps, most of which compute one forward or backward."""
        before, after = self._valid_stage(self.prev_stage), self._valid_stage(self.next_stage)
        last_step = 2 * (self.micro_batches + self.stages - 1) - 1
        for step in range(last_step + 1):
            forward, micro_batch = self._computes(step)
            _, computed = self._computes(step - 1)
            now, sending = self._valid_micro_batch(micro_batch), self._valid_micro_batch(computed)
            instructions: list[PipeInstruction] = []
            # A gradient goes out before an activation comes in, but comes in before an activation goes out: of two
            # neighbours one sends while the other one receives.
            if forward:
                if sending and before:
                    instructions.append(SendGrad(self._buffer_idx(computed)))
                if now and before:
                    instructions.append(RecvActivation(self._buffer_idx(micro_batch)))
                if now and (self.is_first_stage or self.is_last_stage):
                    instructions.append(LoadMicroBatch(self._buffer_idx(micro_batch)))
                if now:
                    instructions.append(ForwardPass(self._buffer_idx(micro_batch)))
            else:
                if now and after:
                    instructions.append(RecvGrad(self._buffer_idx(micro_batch)))
                if sending and after:
                    instructions.append(SendActivation(self._buffer_idx(computed)))
                if now:
                    instructions.append(BackwardPass(self._buffer_idx(micro_batch)))
            if step == last_step:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Two at least; as many as micro-batches are in flight: the distance to the pipeline's end."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _computes(self, step: int) -> tuple[bool, int]:
        """Micro-batch of a step, and whether it is a forward; one that does not exist before and after the batch.

        Forwards come in the steps of the stage's own parity. A micro-batch moves on by a stage per step.
        """
        if (step - self.stage_id) % 2 == 0:
            return True, (step - self.stage_id) // 2
        return False, (step + self.stage_id + 1) // 2 - self.stages


class InferenceSchedule(PipeSchedule):
    """Forwards only; two buffers, between which steps alternate."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Micro-batches + stages - 1 steps."""
        before, after = self._valid_stage(self.prev_stage), self._valid_stage(self.next_stage)
        even = self.stage_id % 2 == 0
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch = step - self.stage_id
            buffer = (step + self.stage_id) % 2
            now = self._valid_micro_batch(micro_batch)
            messages: list[PipeInstruction] = []
            if after and self._valid_micro_batch(micro_batch - 1):
                messages.append(SendActivation(1 - buffer))
            if before and now:
                messages.append(RecvActivation(buffer))
            instructions: list[PipeInstruction] = []
            if now and (self.is_first_stage or self.is_last_stage):
                instructions.append(LoadMicroBatch(buffer))
            instructions += messages if even else messages[::-1]  # of two neighbours one sends first
            if now:
                instructions.append(ForwardPass(buffer))
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Two: one is sent while the other one is received into."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """No pipeline: one micro-batch after the other through the whole model."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """A step per micro-batch."""
        for micro_batch in range(self.micro_batches):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                # No tied gradients: the one rank has tied weights once.
                instructions += [ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1


class TableSchedule(PipeSchedule):
    """One rank's part of a table, with messages and buffers; `lower(table)` makes one for each rank.

    A step is one computation, with the receives before it and the sends after it. Ranks have different numbers of
    steps: no barrier fits between them.

    `is_first_stage` and `is_last_stage` tell whether one of the rank's chunks is the first, or last, of all stages.
    """

    def __init__(self, table: Table, rank: int, ops: Ops, buffers: int) -> None:
        super().__init__(table.micro_batches, table.ranks, rank)
        self.table = table
        self.ops = ops
        self._buffers = buffers

    @property
    def placement(self) -> Placement:
        """The table's."""
        return self.table.placement

    # Made when they are carried out or named in an error; checker and simulator read the arrays.
    @cached_property
    def instructions(self) -> tuple[PipeInstruction, ...]:
        """All of them, in order."""
        chunk_of = [self.placement.chunk_of(stage) for stage in range(self.placement.stages)]
        found: list[PipeInstruction] = []
        for code, stage, micro_batch, buffer in self.ops.tuples():
            if code < TAIL:
                found.append(BUFFER_CLASSES[code](buffer, micro_batch=micro_batch, chunk=chunk_of[stage]))
            else:
                found.append(TAIL_CLASSES[code - TAIL]())
        return tuple(found)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """A step for each action of the row; the last one reduces and steps, too."""
        step: list[PipeInstruction] = []
        computed = False
        for instruction in self.instructions:
            # Sends and the end of the batch belong to the computation before them; anything else begins a step.
            if computed and not isinstance(instruction, _AFTER):
                yield step
                step, computed = [], False
            step.append(instruction)
            computed = computed or isinstance(instruction, _COMPUTE)
        yield step

    def num_pipe_buffers(self) -> int:
        """The most that are in use at once, from a receive or load to the end of the backward."""
        return self._buffers

    @property
    def is_first_stage(self) -> bool:
        """True if the rank has the first of all stages."""
        return self.placement.rank_of(0) == self.stage_id

    @property
    def is_last_stage(self) -> bool:
        """True if the rank has the last of all stages."""
        return self.placement.rank_of(self.placement.stages - 1) == self.stage_id


_COMPUTE = (ForwardPass, BackwardPass, BackwardInput, BackwardWeight)
_AFTER = (SendActivation, SendGrad, ReduceTiedGrads, ReduceGrads, OptimizerStep)

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
    """Content of a schedule's instructions.

    Micro-batches of instructions that name none, which DeepSpeed's do not, are counted per kind of instruction.

    Raises:
        ScheduleError: If there is an unknown instruction.
    """
    placement, rank = schedule.placement, schedule.stage_id
    counts = [0] * len(_CODES)
    ops: list[tuple[int, int, int, int]] = []
    for step in schedule.steps():
        for instruction in step:
            code = _CODES.get(type(instruction), -1)  # By the very class: what a subclass means is unknown here
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
    # A schedule without instructions has no second dimension of its own.
    return Ops(*np.array(ops, dtype=np.int64).reshape(-1, 4).T)
