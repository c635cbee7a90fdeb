"""Evaluation of a model at stage 3 by ranks with different numbers of batches.

While there are ranks without a batch left, those with one tell them of every unit before they gather it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_strategy.distributed import Mesh
from zero_strategy.sharding import ShardedModel

_STEP_OVER, _NOTHING = -1, -2
"""What ranks tell each other in place of a unit's number while some have no batch: the step is over; no step here."""


class SharedEvaluation:
    """Evaluation steps that all ranks take part in."""

    def __init__(self, model: ShardedModel, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    @contextmanager
    def shared_step(self) -> Iterator[None]:
        """One evaluation step of this rank; ranks without a batch left take part through `drain()` (stage 3).

        While there are such ranks, those with a batch tell them of every unit before they gather it.
        """
        gatherer = self._model.gatherer
        if gatherer is None or self._mesh.world_size == 1 or all(self._exchange(1)):
            yield
            return
        gatherer.release_idle()  # as in `drain`: nothing is gathered on any rank
        gatherer.announce_to(self._announce)
        try:
            yield
        finally:
            gatherer.announce_to(None)
            gatherer.release_idle()
            self._exchange(_STEP_OVER)

    def drain(self) -> None:
        """Take part in the other ranks' evaluation steps until no rank has a batch left (stage 3)."""
        gatherer = self._model.gatherer
        if gatherer is None or self._mesh.world_size == 1:
            return
        gatherer.release_idle()
        while any(self._exchange(0)):
            while (number := max(self._exchange(_NOTHING))) >= 0:
                if number < len(gatherer.units):  # else ranks with a batch agree on something
                    gatherer.units[number].gather()
                    gatherer.units[number].release()

    def agree(self, value: int) -> int:
        """In a step: the least value of all ranks that have a batch, where these must gather alike (stage 3).

        Args:
            value: This rank's; not negative.
        """
        gatherer = self._model.gatherer
        if gatherer is None or self._mesh.world_size == 1:
            return value
        above = len(gatherer.units)
        return min(other for other in self._exchange(above + value) if other != _NOTHING) - above

    def _announce(self, number: int) -> None:
        everyone = self._exchange(number)
        if len({other for other in everyone if other != _NOTHING}) > 1:
            names = {
                rank: "the end of the step" if other == _STEP_OVER else repr(self._model.units[other].name)
                for rank, other in enumerate(everyone)
                if other != _NOTHING
            }
            raise RuntimeError(
                f"ranks evaluate different parts of the model, which stage 3 cannot serve while it is sharded: {names}"
            )

    def _exchange(self, number: int) -> list[int]:
        return [int(other) for other in self._mesh.control.exchange_small(torch.tensor([number], dtype=torch.int32))]
