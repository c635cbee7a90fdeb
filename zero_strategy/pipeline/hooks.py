"""What an engine does around the instructions of a pipeline."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from zero_strategy.pipeline.actions import Kind


class Computation(NamedTuple):
    """A forward, a backward or half of one.

    Attributes:
        kind: Which.
        micro_batch: Of the batch.
        chunk: Of the rank.
        stage: The chunk's number among all stages.
        last: Nothing later in this batch adds gradients to the chunk's parameters.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    stage: int
    last: bool


class ExecutorHooks:
    """Does nothing at each place; an engine overrides what it needs."""

    def before(self, computation: Computation) -> None:
        """Called before every computation."""

    def after(self, computation: Computation) -> None:
        """Called after every computation."""

    def scale_loss(self, loss: Tensor, micro_batches: int) -> Tensor:
        """What the backward of a micro-batch begins at."""
        return loss / micro_batches

    def forwarded(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        """The last stage has forwarded a micro-batch.

        Args:
            micro_batch: Of the batch.
            outputs: Of the stage; in training with their graph, so that keeping them keeps all activations.
            loss: Without a graph; None if there is none.
        """

    def reduce_tied_grads(self) -> None:
        """ReduceTiedGrads."""

    def reduce_grads(self) -> None:
        """ReduceGrads."""

    def optimizer_step(self) -> None:
        """OptimizerStep."""
