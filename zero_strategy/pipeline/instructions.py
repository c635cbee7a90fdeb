"""What a pipeline engine is told to do: DeepSpeed's instructions, and two for backwards in halves.

Instructions of a lowered table carry `buffer_id`, `micro_batch` and `chunk`. Those of DeepSpeed's schedules carry
`buffer_id` only: micro-batches come in order there, and a rank has one stage.
"""

from __future__ import annotations

from typing import Any


class PipeInstruction:
    """Anything that a schedule asks of a rank; the keywords become members."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = self.__class__.__name__
        self.kwargs = kwargs
        self.__dict__.update(kwargs)

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
