"""This rank's parts of the gradients of some parameters: to take their norm, to scale and to clamp them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from zero_strategy.optim.norm import Shard, check_norm_type
from zero_strategy.sharding.gradients import GradientBucket
from zero_strategy.sharding.model import ShardedModel


def gradient_parts(
    model: ShardedModel, parameters: Iterable[nn.Parameter], only: Container[int] | None = None
) -> Iterator[tuple[GradientBucket, int, Shard, float]]:
    """This rank's part of every gradient that a next step will use: bucket, index, values, factor to come.

    Args:
        model: What has the gradients.
        parameters: Those that are looked at.
        only: Ids of the ones among them that count; default: all.
    """
    found: dict[int, dict[int, tuple[Shard, float]]] = {}
    for parameter in parameters:
        if only is not None and id(parameter) not in only:
            continue
        place = model.place(parameter)
        assert place is not None
        gradients, index = model.gradient_of(place[0]), place[1]
        if id(gradients) not in found:
            found[id(gradients)] = gradients.scaled_gradients()
        if index in found[id(gradients)]:
            yield gradients, index, *found[id(gradients)][index]


def norm_parts(
    model: ShardedModel, parameters: Iterable[nn.Parameter], norm_type: float, only: Container[int] | None = None
) -> tuple[list[Shard], list[float], list[str]]:
    """Every element of the gradients once over all ranks that divide them: values, the factors to come, names.

    Raises:
        ValueError: If there is no norm of that type.
    """
    check_norm_type(norm_type)  # before anybody expects it of gradients to come
    chosen = list(parameters)
    for parameter in chosen:
        place = model.place(parameter)
        assert place is not None
        model.gradient_of(place[0]).round_scales()
        model.gradient_of(place[0]).expect_norm(norm_type)
    shards, factors, names = [], [], []
    for gradients, index, values, factor in gradient_parts(model, chosen, only):
        bucket = gradients.bucket
        if not bucket.parts[index].counts:
            continue  # the first tensor-parallel rank has the same
        if not bucket.placement.shard_optimizer:  # whole on every rank: count the own slice only
            pieces = bucket.layout.pieces(*bucket.layout.slice_bounds(model.mesh.shard_rank))
            cuts = [piece for piece in pieces if piece.index == index]
            start, stop = (cuts[0].start, cuts[0].stop) if cuts else (0, 0)
            values = values[start:stop] if isinstance(values, Tensor) else values.narrow(start, stop)
        shards.append(values)
        factors.append(factor)
        names.append(bucket.names[index])
    return shards, factors, names


@torch.no_grad()
def scale_parts(
    model: ShardedModel, parameters: Iterable[nn.Parameter], factor: float, only: Container[int] | None = None
) -> None:
    """Multiply the gradients; a fused step does it on its way."""
    for gradients, index, _, _ in list(gradient_parts(model, parameters, only)):
        gradients.scale(index, factor)


@torch.no_grad()
def clamp_parts(
    model: ShardedModel, parameters: Iterable[nn.Parameter], limit: float, only: Container[int] | None = None
) -> None:
    """Clamp every element of the gradients to [-limit, limit]. A collective."""
    model.reducer.settle()
    for gradients, index, _, _ in list(gradient_parts(model, parameters, only)):
        gradients.change(index, partial(torch.clamp_, min=-limit, max=limit))
