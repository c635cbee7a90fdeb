"""Schedules as a pipeline engine takes them: steps of instructions, for one rank.

`TrainSchedule`, `InferenceSchedule` and `DataParallelSchedule` generate what DeepSpeed's classes of these names do,
instruction for instruction. `TableSchedule` is one rank's part of a lowered table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from zero_strategy.pipeline.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
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
from zero_strategy.pipeline.opcodes import BUFFER_CLASSES, TAIL, TAIL_CLASSES, Ops
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.tables import Table


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
        """How many buffers the instructions use; a schedule that needs fewer than one per micro-batch says so."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """Which rank of the pipeline this is for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """How many ranks the pipeline has."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches make the batch."""
        return self.micro_batches

    @property
    def placement(self) -> Placement:
        """Where the stages are: one on each rank."""
        return Placement(self.stages)

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank takes the model's inputs."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank makes the model's outputs."""
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
        """Whether a step is a forward, and of which micro-batch; one that does not exist before and after the batch.

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
        """Whether the rank has the first of all stages."""
        return self.placement.rank_of(0) == self.stage_id

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank has the last of all stages."""
        return self.placement.rank_of(self.placement.stages - 1) == self.stage_id


_COMPUTE = (ForwardPass, BackwardPass, BackwardInput, BackwardWeight)
_AFTER = (SendActivation, SendGrad, ReduceTiedGrads, ReduceGrads, OptimizerStep)
