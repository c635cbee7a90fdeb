"""A model chunk: one stage of a rank, and what is in flight in it.

its module, and what is in flight in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero_strategy.pipeline.messages import Structure, TensorKind, kind_of, put_together, take_apart
from zero_strategy.pipeline.split_backward import Entrance, SplitBackward, whole_backward


class StageMessage(NamedTuple):
    """Data of a message from a stage to its neighbour.

    Attributes:
        structure: Around the tensors.
        kinds: What they are; those that want a gradient get one back.
        tensors: They themselves. In gradients: None where there is none.
    """

    structure: Structure
    kinds: tuple[TensorKind, ...]
    tensors: tuple[Tensor, ...]


@dataclass
class _InFlight:
    """A micro-batch between its forward and the end of its backward."""

    inputs: list[GradientEdge] = field(default_factory=list)
    """Whose gradients go back."""
    roots: list[GradientEdge] = field(default_factory=list)
    split: SplitBackward | None = None


class Chunk:
    """A stage.

    Args:
        module: Takes what the stage before returned, or the inputs of a micro-batch.
        stage: Its number among all stages.
        last: Whether it is the last of all.
    """

    def __init__(self, module: Callable[[Any], Any], stage: int, last: bool) -> None:
        self.module, self.stage, self.last = module, stage, last
        self._in_flight: dict[int, _InFlight] = {}
        self._structure: Structure | None = None
        self._anchor = torch.empty((), requires_grad=True)
        self.seen: Structure | None = None

    def accept(self, micro_batch: int, stage_message: StageMessage, training: bool) -> Any:
        """The input of a forward, from what the stage before gave: a graph begins at tensors that want a gradient."""
        flight = self._in_flight[micro_batch] = _InFlight()
        tensors = list(stage_message.tensors)
        wanting = [i for i, kind in enumerate(stage_message.kinds) if training and kind.wants_gradient]
        if wanting:
            entered = Entrance.apply(self._anchor, *(tensors[i] for i in wanting))
            flight.inputs = [get_gradient_edge(tensor) for tensor in entered]
            for i, tensor in zip(wanting, entered):
                tensors[i] = tensor
        self.seen = stage_message.structure
        return put_together(tensors, stage_message.structure)

    def forward(self, micro_batch: int, value: Any) -> Any:
        """Run the module."""
        self._in_flight.setdefault(micro_batch, _InFlight())
        found = self.module(value)
        self._structure = self.seen
        return found

    def pack(self, micro_batch: int, outputs: Any, training: bool) -> StageMessage:
        """Tensors that go to the next stage; of the outputs, only their places in the graph are kept.

        Raises:
            TypeError: If something in the outputs cannot be sent.
        """
        tensors, structure = take_apart(outputs)
        wanting = [training and tensor.requires_grad for tensor in tensors]
        kinds = tuple(kind_of(tensor, wants) for tensor, wants in zip(tensors, wanting))
        if training:
            self._in_flight[micro_batch].roots = [get_gradient_edge(t) for t, wants in zip(tensors, wanting) if wants]
        else:
            del self._in_flight[micro_batch]
        return StageMessage(structure, kinds, tuple(tensor.detach() for tensor in tensors))

    def end(self, micro_batch: int, loss: Tensor | None) -> None:
        """The last stage's forward is over; its backward begins at the loss. None: there will be none."""
        if loss is None:
            del self._in_flight[micro_batch]
            return
        self._in_flight[micro_batch].roots = [get_gradient_edge(loss)] if loss.requires_grad else []

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> StageMessage:
        """An ordinary backward; returns the gradients of the inputs."""
        flight = self._in_flight.pop(micro_batch)
        roots, there = self._match(micro_batch, flight, gradients)
        return _gradients(whole_backward(roots, there, flight.inputs))

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> StageMessage:
        """The input half of a backward; returns the gradients of the inputs."""
        flight = self._in_flight[micro_batch]
        roots, there = self._match(micro_batch, flight, gradients)
        flight.split = SplitBackward(roots, there, flight.inputs)
        found = flight.split.input_half()
        flight.inputs, flight.roots = [], []
        return _gradients(found)

    def backward_weight(self, micro_batch: int) -> None:
        """The weight half of a backward."""
        flight = self._in_flight.pop(micro_batch)
        assert flight.split is not None, micro_batch
        flight.split.weight_half()

    def clear(self) -> None:
        """Forget what is in flight."""
        self._in_flight.clear()

    @property
    def changed(self) -> tuple[Structure, Structure] | None:
        """The structures of the last input that went through and of the present one, if they differ."""
        before, now = self._structure, self.seen
        return (before, now) if before is not None and now is not None and before != now else None

    def _match(
        self, micro_batch: int, flight: _InFlight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """The outputs that have a gradient, and it. The loss has none: it is a one."""
        if self.last:
            return flight.roots, [None] * len(flight.roots)
        if len(gradients) != len(flight.roots):
            raise ValueError(
                f"{len(gradients)} gradients came back for micro-batch {micro_batch}, of which stage {self.stage} sent "
                f"{len(flight.roots)} tensors that want one"
            )
        pairs = [(root, gradient) for root, gradient in zip(flight.roots, gradients) if gradient is not None]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _gradients(found: Sequence[Tensor | None]) -> StageMessage:
    """Gradients in the order of the tensors that wanted one; None stands in the structure."""
    with torch.no_grad():
        tensors, structure = take_apart([None if one is None else one.detach() for one in found])
    return StageMessage(structure, tuple(kind_of(tensor, False) for tensor in tensors), tuple(tensors))
