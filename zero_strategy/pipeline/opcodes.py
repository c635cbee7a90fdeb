"""Instructions as numbers, for what makes or looks at many of them: lowering, the checker, the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
