"""What a pipeline raises on all of its ranks when one of them cannot go on."""

from __future__ import annotations

from typing import Any

from zero_strategy.distributed.desync import DesyncError
from zero_strategy.distributed.failure_board import Failure


class PipelineError(DesyncError):
    """A stage has failed, is gone, does not come or is out of step; the message names it and the cause."""


class OutOfStepError(PipelineError):
    """A stage runs something else than its neighbour."""


class DataEndedError(StopIteration):
    """The data iterator ended before the last micro-batch of a batch.

    Attributes:
        stage: Global stage that was loading.
        micro_batch: That it did not get.
        needed: Micro-batches of the batch.
    """

    def __init__(self, message: str, stage: int, micro_batch: int, needed: int) -> None:
        super().__init__(message)
        self.stage, self.micro_batch, self.needed = stage, micro_batch, needed


def failure_of(error: BaseException, rank: int, where: str, more: str = "") -> Failure:
    """What the other ranks are told of an error.

    Args:
        error: Raised here.
        rank: This one, in the world.
        where: The stage and what it was doing.
        more: What else there is to say.
    """
    if isinstance(error, DataEndedError):
        details: dict[str, Any] = {"stage": error.stage, "micro_batch": error.micro_batch, "needed": error.needed}
        return Failure("data", rank, str(error), details)
    if isinstance(error, OutOfStepError):
        return Failure("step", rank, str(error), {})
    if isinstance(error, DesyncError) and error.failure is not None:
        return error.failure
    return Failure("raised", rank, f"{where}: {type(error).__name__}: {error}{more}", {})


def error_of(failure: Failure) -> Exception:
    """What is raised on the other ranks."""
    if failure.kind == "data":
        return DataEndedError(failure.text, **failure.details)
    return OutOfStepError(failure.text) if failure.kind == "step" else PipelineError(failure.text)
