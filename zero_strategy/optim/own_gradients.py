"""The gradients of some parameters, an optimizer's say, on this rank: their norm, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from zero_strategy.ops.arguments import norm_order
from zero_strategy.optim.norm import GradientNorm, Shard, global_norm
from zero_strategy.sharding.gradients import GradientBucket
from zero_strategy.sharding.model import ShardedModel


class OwnGradients:
    """What clipping and unscaling ask of an optimizer.

    Args:
        model: The sharded model.
        parameters: The parameters, all of them the model's.
    """

    def __init__(self, model: ShardedModel, parameters: Callable[[], Iterator[nn.Parameter]]) -> None:
        self._model, self._parameters = model, parameters

    def _each(self, only: Container[int] | None = None) -> Iterator[tuple[GradientBucket, int, Shard, float]]:
        """This rank's part of every gradient that the next step will use: bucket, index, values, factor to come.

        Args:
            only: Ids of the parameters that count; default: all.
        """
        found: dict[GradientBucket, dict[int, tuple[Shard, float]]] = {}
        for gradients, index in self._places(only):
            if gradients not in found:
                found[gradients] = gradients.scaled_gradients()
            if index in found[gradients]:
                yield gradients, index, *found[gradients][index]

    def _with_gradients(self, only: Container[int] | None) -> dict[GradientBucket, list[int]]:
        """The same without values: buckets and indices there."""
        wanted: dict[GradientBucket, set[int]] = {}
        for gradients, index in self._places(only):
            wanted.setdefault(gradients, set()).add(index)
        return {
            gradients: [index for index in gradients.owned_indices() if index in indices]
            for gradients, indices in wanted.items()
        }

    def _places(self, only: Container[int] | None = None) -> Iterator[tuple[GradientBucket, int]]:
        """Where the parameters' gradients are, whether they have one or not: bucket, index."""
        place_of, gradient_of = self._model.place, self._model.gradient_of
        for parameter in self._parameters():
            if only is None or id(parameter) in only:
                place = place_of(parameter)
                assert place is not None
                yield gradient_of(place[0]), place[1]

    def shards(
        self, norm_type: float | str, only: Container[int] | None = None
    ) -> tuple[list[Shard], list[float], list[str]]:
        """Every element of the gradients once over all ranks that divide them: values, the factors to come, names."""
        norm_type = norm_order(norm_type)  # before anybody expects it of gradients to come
        for expecting in {gradients: None for gradients, _ in self._places()}:
            expecting.round_scales()
            expecting.expect_norm(norm_type)
        shards, factors, names = [], [], []
        for gradients, index, values, factor in self._each(only):
            bucket = gradients.bucket
            if not bucket.parts[index].counts:
                continue  # the first tensor-parallel rank has the same
            if not bucket.placement.shard_optimizer:  # whole on every rank: count the own slice only
                cut = bucket.slice_piece_of.get(index)
                start, stop = (0, 0) if cut is None else (cut.start, cut.stop)
                values = values[start:stop] if isinstance(values, Tensor) else values.narrow(start, stop)
            shards.append(values)
            factors.append(factor)
            names.append(bucket.names[index])
        return shards, factors, names

    def norm(self, norm_type: float | str = 2.0) -> GradientNorm:
        """Their norm over all ranks. A collective."""
        self._model.reducer.settle()
        shards, factors, _ = self.shards(norm_type)
        return global_norm(shards, norm_type, [*self._model.norm_groups], factors)

    @torch.no_grad()
    def scale(self, factor: float, only: Container[int] | None = None) -> None:
        """Multiply the gradients; a fused step does it on its way."""
        if factor == 1.0:
            return
        for gradients, indices in self._with_gradients(only).items():
            gradients.scale(indices, factor)

    @torch.no_grad()
    def clip_values(self, limit: float, only: Container[int] | None = None) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        self._model.reducer.settle()
        for gradients, indices in self._with_gradients(only).items():
            for index in indices:
                gradients.change(index, partial(torch.clamp_, min=-limit, max=limit))
