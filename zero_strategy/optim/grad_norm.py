"""Gradient norms and clipping: one figure for every stage.

The norm is one figure for every stage, and the clip follows from it.

Squares are summed in float64 (`ops.grad_stats`), so that the norm does not depend on how the elements are divided (up
to the last bit of a float64, which the float32 coefficient does not see). Where that bit counts, sums are exact
(`optim.exact_sum`): the norm has the same bits however they are divided. Non-finite values are a flag of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zero_strategy import ops
from zero_strategy.comm.collectives import Communicator
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.ops.library import norm_order
from zero_strategy.optim.norm_totals import norm_totals
from zero_strategy.optim.power_sums import Shard


@dataclass(frozen=True)
class GradientNorm:
    """The norm of a set of gradients over all ranks.

    Attributes:
        value: The norm (inf or nan if a gradient is).
        finite: Whether every element of every gradient on every rank is finite.
    """

    value: float
    finite: bool

    def coefficient(self, max_norm: float) -> float:
        """Factor of gradients so that their norm is at most `max_norm`; 1.0 below it.

        The formula is `torch.nn.utils.clip_grad_norm_`'s: max_norm / (norm + 1e-6), at most 1.
        """
        # `min(1.0, nan)` is 1.0 in Python, which would hide the nan; torch's coefficient is nan.
        return min(1.0, max_norm / (self.value + 1e-6)) if not math.isnan(self.value) else math.nan


@dataclass(frozen=True)
class GradientStats:
    """Findings of the pass over the gradients that a norm takes, on this rank, part by part.

    Attributes:
        names: The parameter of each part.
        norm_type: p.
        sums: Of |x| ** p (inf: the largest |x|) over each part, float64.
        nonfinite: How many x of each part are not finite.
        norm: Of all ranks together.
    """

    names: list[str]
    norm_type: float
    sums: Tensor
    nonfinite: Tensor
    norm: GradientNorm


def global_norm(
    shards: Iterable[Shard],
    norm_type: float | str,
    groups: Iterable[Communicator],
    scales: Sequence[float] | None = None,
    look: Callable[[Tensor, Tensor], None] | None = None,
    *,
    exact: bool = False,
) -> GradientNorm:
    """The norm of all ranks' `shards` together.

    Args:
        shards: This rank's parts, flat; every element of a gradient lies on exactly one rank of `groups`.
        scales: What each part is to be multiplied by first; default: 1.
        norm_type: Any positive p, or inf, also as the string "inf".
        groups: Communicators over which the parts are spread (the shard axis, and model-parallel groups).
        look: Takes the sums of this rank's parts, and how many values of each are not finite.
        exact: Round the sum of powers once. Parts are to be cut at multiples of `ops.block_sums.BLOCK` elements.

    Raises:
        ValueError: If `norm_type` is not positive.
    """
    norm_type = norm_order(norm_type)
    shards, groups = list(shards), list(groups)
    factors = [1.0] * len(shards) if scales is None else scales
    if math.isinf(norm_type):
        largest, finite = norm_totals(shards, norm_type, groups, factors, look)
        return GradientNorm(largest, finite)
    total, finite = norm_totals(shards, norm_type, groups, factors, look, exact=exact)
    if not finite:
        return GradientNorm(total, False)
    if math.isfinite(total):
        return GradientNorm(_root(total, norm_type, exact=exact), True)
    # finite numbers whose powers are not: as multiples of the largest
    # All ranks come here together: total and flag are the same on each of them.
    largest, _ = norm_totals(shards, math.inf, groups, factors)
    if exact:
        # Of a power of two, by which a multiplication is exact.
        exponent = math.frexp(largest)[1]
        smaller = [math.ldexp(factor, -exponent) for factor in factors]
        total, _ = norm_totals(shards, norm_type, groups, smaller, exact=True)
        return GradientNorm(_times_power_of_two(_root(total, norm_type, exact=True), exponent), True)
    parts = [
        (shard if isinstance(shard, Tensor) else shard.read()).detach().double() * (factor / largest)
        for shard, factor in zip(shards, factors, strict=True)
    ]
    total, _ = norm_totals(parts, norm_type, groups, [1.0] * len(parts))
    return GradientNorm(largest * _root(total, norm_type, exact=False), True)


def _root(total: float, norm_type: float, *, exact: bool) -> float:
    """The norm of a sum of powers."""
    # Square roots are rounded correctly everywhere, which is not said of powers.
    if exact and norm_type == 2:
        return math.sqrt(total)
    try:
        return float(total ** (1.0 / norm_type))
    except OverflowError:  # with p below 1 the norm may be larger than the sum
        return math.inf


def _times_power_of_two(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


class OwnGradients:
    """Needs of clipping and unscaling from an optimizer.

    Args:
        model: The sharded model.
        parameters: The parameters, all of them the model's.
    """

    def __init__(self, model: ShardedModel, parameters: Callable[[], Iterator[nn.Parameter]]) -> None:
        self._model, self._parameters = model, parameters
        for device in {bucket.device.type for bucket in model.buckets}:
            ops.ensure(device)  # whatever the optimizer: norms are taken by its kernels

    def _each(self, places: Iterable[tuple[GradientBucket, int]]) -> Iterator[tuple[GradientBucket, int, Shard, float]]:
        """This rank's part of those gradients that the next step will use: bucket, index, values, factor to come."""
        found: dict[GradientBucket, dict[int, tuple[Shard, float]]] = {}
        for gradients, index in places:
            if gradients not in found:
                found[gradients] = gradients.scaled_gradients()
            if index in found[gradients]:
                yield gradients, index, *found[gradients][index]

    def _with_gradients(self, only: Container[int] | None) -> dict[GradientBucket, list[int]]:
        """Buckets and indices of parameters that have gradients."""
        wanted: dict[GradientBucket, set[int]] = {}
        for gradients, index in self._places(only):
            wanted.setdefault(gradients, set()).add(index)
        return {
            gradients: [index for index in gradients.owned_indices() if index in indices]
            for gradients, indices in wanted.items()
        }

    def _places(self, only: Container[int] | None = None) -> Iterator[tuple[GradientBucket, int]]:
        """Places of the parameters' gradients, whether they have one or not: bucket, index."""
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
        everywhere = list(self._places())
        for expecting in {gradients: None for gradients, _ in everywhere}:
            # The norm is of the values that the step will use: a multiplication that rounds is carried out before.
            expecting.round_scales()
            # The next reductions into a tier sum powers of this order on the way.
            expecting.expect_norm(norm_type, exact=self._model.exact_norms)
        shards, factors, names = [], [], []
        for gradients, index, values, factor in self._each(everywhere if only is None else self._places(only)):
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
        return global_norm(shards, norm_type, [*self._model.norm_groups], factors, exact=self._model.exact_norms)

    @torch.no_grad()
    def scale(self, factor: float, only: Container[int] | None = None) -> None:
        """Multiply the gradients; a fused step does it on its way."""
        # A clip below its limit: no pass over memory.
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
