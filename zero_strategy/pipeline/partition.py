"""Dividing layers into stages, each of consecutive layers and at least one: pure functions from weights to bounds.

Bounds [0, 3, 7] mean two stages: layers 0 to 2, and 3 to 6.

A balanced division has the least possible largest stage. That leaves a choice, above all where many layers weigh
nothing; the rules, in this order: the least sum of squares of the stages' weights (as even as can be), then the least
sum of squares of their numbers of layers, then the longer stages first. Weights are compared exactly, floats too, so
that all ranks, and all machines, find the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

Weight = int | float


def uniform_bounds(layers: int, stages: int) -> list[int]:
    """Stages of equal length; the first ones are one longer where that does not come out even.

    Args:
        layers: Number of layers.
        stages: Number of stages.

    Returns:
        stages + 1 bounds.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    _check_counts(layers, stages)
    length, longer = divmod(layers, stages)
    return [stage * length + min(stage, longer) for stage in range(stages + 1)]


def balanced_bounds(
    weights: Sequence[Weight],
    stages: int,
    *,
    bytes_of_stage: Sequence[Sequence[int]] | None = None,
    byte_limit: int | None = None,
) -> list[int]:
    """The division whose largest stage is the smallest; see above for the choice among several.

    Args:
        weights: Of each layer: a number that is not negative.
        stages: Number of stages.
        bytes_of_stage: [stage][layer]: what a layer takes where it is on that stage.
        byte_limit: Most bytes of a stage.

    Returns:
        stages + 1 bounds.

    Raises:
        ValueError: If there are fewer layers than stages, a weight is negative or no number, or no division keeps the
            limit.
    """
    _check_counts(len(weights), stages)
    values = _exact(weights)
    if byte_limit is None or bytes_of_stage is None:
        fits = _Fits([[0] * len(weights)] * stages, 0)
    else:
        fits = _Fits(bytes_of_stage, byte_limit)
    least = _least_maximum(values, stages, fits)
    if least is None:
        assert bytes_of_stage is not None
        raise ValueError(_no_room(bytes_of_stage, byte_limit, stages))
    return _most_even(values, stages, least, fits)


def type_weights(names: Sequence[str], pattern: str) -> list[int]:
    """1 for each layer whose class name contains a match of a regular expression, in any case of letters; else 0.

    Args:
        names: The layers' class names.
        pattern: The expression.

    Raises:
        ValueError: If the expression is none, or nothing matches; names the classes there are.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"partition_method 'type:{pattern}' is no regular expression: {error}") from None
    weights = [int(compiled.search(name) is not None) for name in names]
    if not any(weights):
        known = ", ".join(dict.fromkeys(names))
        raise ValueError(f"partition_method 'type:{pattern}' matches no layer; classes of the layers: {known}")
    return weights


def checked_bounds(bounds: Sequence[int], layers: int, stages: int) -> list[int]:
    """Bounds that were given.

    Raises:
        ValueError: If they are not stages + 1 increasing integers from 0 to the number of layers.
    """
    _check_counts(layers, stages)
    found = list(bounds)
    right = len(found) == stages + 1 and all(type(bound) is int for bound in found)
    if not right or found[0] != 0 or found[-1] != layers or any(a >= b for a, b in pairwise(found)):
        raise ValueError(
            f"partition_method {found}: for {stages} stages of {layers} layers bounds are {stages + 1} increasing "
            f"integers, the first 0 and the last {layers}, such as {uniform_bounds(layers, stages)}"
        )
    return found


class _Fits:
    """Whether layers i to j - 1 may be a stage, by their bytes there."""

    def __init__(self, bytes_of_stage: Sequence[Sequence[int]], limit: int) -> None:
        self._sums = [[0, *accumulate(sizes)] for sizes in bytes_of_stage]
        self._limit = limit

    def __call__(self, stage: int, start: int, stop: int) -> bool:
        return self._sums[stage][stop] - self._sums[stage][start] <= self._limit


def _least_maximum(values: Sequence[int], stages: int, fits: _Fits) -> int | None:
    """The least that the largest stage can weigh, by dynamic programming over suffixes; None: nothing fits."""
    layers, sums = len(values), [0, *accumulate(values)]
    best: list[int | None] = [None] * layers + [0]  # for the stages after the one that is looked at
    for stage in reversed(range(stages)):
        now: list[int | None] = [None] * (layers + 1)
        for start in range(layers - 1, -1, -1):
            for stop in range(start + 1, layers + 1):
                if not fits(stage, start, stop):
                    break
                rest, weight = best[stop], sums[stop] - sums[start]
                least = now[start]
                if least is not None and weight > least:
                    break  # longer stages only weigh more
                if rest is not None and (least is None or max(weight, rest) < least):
                    now[start] = max(weight, rest)
        best = now
    return best[0]


def _most_even(values: Sequence[int], stages: int, largest: int, fits: _Fits) -> list[int]:
    """The chosen division among those whose stages weigh at most `largest`."""
    layers, sums = len(values), [0, *accumulate(values)]
    costs: list[list[tuple[int, int] | None]] = [[None] * layers + [(0, 0)]]
    nexts: list[list[int]] = []
    for stage in reversed(range(stages)):
        cost: list[tuple[int, int] | None] = [None] * (layers + 1)
        follow = [0] * (layers + 1)
        for start in range(layers):
            for stop in range(start + 1, layers + 1):
                weight = sums[stop] - sums[start]
                if weight > largest or not fits(stage, start, stop):
                    break
                rest, least = costs[-1][stop], cost[start]
                if rest is None:
                    continue
                found = (weight * weight + rest[0], (stop - start) ** 2 + rest[1])
                if least is None or found <= least:  # the last of equal ones is the longest stage
                    cost[start], follow[start] = found, stop
        costs.append(cost)
        nexts.append(follow)
    bounds = [0]
    for follow in reversed(nexts):
        bounds.append(follow[bounds[-1]])
    return bounds


def _exact(weights: Sequence[Weight]) -> list[int]:
    """Integers in the same proportions; floats are fractions of powers of two, so there are some."""
    for layer, weight in enumerate(weights):
        if not isinstance(weight, (int, float)) or not isfinite(weight) or weight < 0:
            raise ValueError(f"layer {layer} has the weight {weight!r}; accepted: finite numbers from 0 on")
    fractions = [Fraction(weight) for weight in weights]
    scale = lcm(*(value.denominator for value in fractions))
    return [int(value * scale) for value in fractions]


def _check_counts(layers: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"a pipeline has at least one stage, not {stages}")
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be divided into {stages} stages of at least one layer; use at most {layers} "
            "stages (ranks x chunks), or split a layer into several"
        )


def _no_room(bytes_of_stage: Sequence[Sequence[int]], limit: int | None, stages: int) -> str:
    least = _least_maximum(list(bytes_of_stage[0]), stages, _Fits([[0] * len(bytes_of_stage[0])] * stages, 0))
    return (
        f"no division into {stages} stages keeps each within {limit} bytes: the largest needs about {least}; use more "
        "stages, smaller micro-batches or activation checkpointing"
    )
