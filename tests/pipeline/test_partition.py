"""Dividing layers into stages, against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.pipeline.partition import (
    Weight,
    balanced_bounds,
    checked_bounds,
    type_weights,
    uniform_bounds,
)


def divisions(layers: int, stages: int) -> list[list[int]]:
    return [[0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1)]


def of_stages(values: list[int], bounds: list[int]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(bounds)]


def by_rule(values: list[int], stages: int, allowed: list[list[int]] | None = None) -> list[int]:
    """The documented choice: least maximum, least squares of weights, of lengths, then longer stages first."""

    def order(bounds: list[int]) -> tuple[int, int, int, list[int]]:
        weights, lengths = of_stages(values, bounds), of_stages([1] * len(values), bounds)
        squares = (sum(weight**2 for weight in weights), sum(length**2 for length in lengths))
        return max(weights), *squares, [-bound for bound in bounds]

    return min(allowed if allowed is not None else divisions(len(values), stages), key=order)


weights_and_stages = st.lists(st.integers(0, 12), min_size=1, max_size=9).flatmap(
    lambda weights: st.tuples(st.just(weights), st.integers(1, len(weights)))
)


@given(weights_and_stages)
def test_balanced_is_the_best_by_the_rule(case: tuple[list[int], int]) -> None:
    weights, stages = case
    assert balanced_bounds(weights, stages) == by_rule(weights, stages)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=7), st.data())
def test_floats_are_compared_exactly(weights: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    halves = [int(weight * 2) for weight in weights]
    assert balanced_bounds([half / 2 for half in halves], stages) == by_rule(halves, stages)
    assert balanced_bounds(weights, stages) == balanced_bounds([weight * 4 for weight in weights], stages)


@given(weights_and_stages, st.data())
def test_a_limit_of_bytes_is_kept(case: tuple[list[int], int], data: st.DataObject) -> None:
    weights, stages = case
    row = st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights))
    sizes, limit = data.draw(st.lists(row, min_size=stages, max_size=stages)), data.draw(st.integers(0, 25))

    def fits(bounds: list[int]) -> bool:
        return all(sum(sizes[i][a:b]) <= limit for i, (a, b) in enumerate(pairwise(bounds)))

    allowed = [bounds for bounds in divisions(len(weights), stages) if fits(bounds)]
    if allowed:
        found = balanced_bounds(weights, stages, bytes_of_stage=sizes, byte_limit=limit)
        assert found == by_rule(weights, stages, allowed)
    else:
        with pytest.raises(ValueError, match=f"keeps each within {limit} bytes"):
            balanced_bounds(weights, stages, bytes_of_stage=sizes, byte_limit=limit)


@given(st.integers(1, 60), st.data())
def test_uniform_differs_by_one_at_most(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    bounds = uniform_bounds(layers, stages)
    lengths = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == layers and len(lengths) == stages
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_uniform_of_seven_layers() -> None:  # as DeepSpeed's
    assert uniform_bounds(7, 3) == [0, 3, 5, 7] and uniform_bounds(8, 4) == [0, 2, 4, 6, 8]


def test_two_hundred_layers_take_no_time() -> None:
    weights = [1000 + 7 * (i * 37 % 11) for i in range(200)]
    bounds = balanced_bounds(weights, 16)
    assert max(of_stages(weights, bounds)) <= sum(weights) / 16 + max(weights)
    assert len(balanced_bounds([0] * 100 + [1] + [0] * 99, 16)) == 17


def test_types() -> None:
    names = ["Embedding", "GPTBlock", "Dropout", "GPTBlock", "to_logits"]
    assert type_weights(names, "block") == [0, 1, 0, 1, 0] == type_weights(names, "^gpt.*K$")
    assert balanced_bounds(type_weights(names, "block"), 2) == [0, 3, 5]
    with pytest.raises(ValueError, match=r"'type:attention' matches no layer; .*: Embedding, GPTBlock, Dropout, to_"):
        type_weights(names, "attention")
    with pytest.raises(ValueError, match=r"'type:\(' is no regular expression"):
        type_weights(names, "(")


def test_bounds_that_are_given() -> None:
    assert checked_bounds((0, 3, 7), 7, 2) == [0, 3, 7]
    for wrong in ([0, 7], [1, 3, 7], [0, 3, 6], [0, 0, 7], [0, 3.0, 7], [0, 5, 3, 7]):
        with pytest.raises(ValueError, match=r"3 increasing integers, the first 0 and the last 7, such as \[0, 4, 7\]"):
            checked_bounds(wrong, 7, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("divide", [lambda n, s: uniform_bounds(n, s), lambda n, s: balanced_bounds([1] * n, s)])
def test_more_stages_than_layers(divide: object) -> None:
    with pytest.raises(ValueError, match=r"3 layers cannot be divided into 4 stages .* use at most 3 stages"):
        divide(3, 4)  # type: ignore[operator]
    with pytest.raises(ValueError, match="at least one stage, not 0"):
        divide(3, 0)  # type: ignore[operator]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), None])
def test_weights_that_are_none(weight: Weight) -> None:
    with pytest.raises(ValueError, match="layer 1 has the weight"):
        balanced_bounds([1, weight], 2)
