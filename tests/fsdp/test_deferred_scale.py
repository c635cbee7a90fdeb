"""Factors wait, are joined where that rounds nothing, and are carried out in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_strategy.fsdp.grad_accumulation import DeferredScale


def test_products_have_the_bits_of_one_multiplication_after_the_other() -> None:
    values = {index: torch.randn(100, generator=torch.Generator().manual_seed(index)) for index in range(3)}
    expected = {index: value.clone() for index, value in values.items()}
    calls: list[tuple[int, float]] = []

    def multiply(indices: Sequence[int], factor: float) -> None:
        for index in indices:
            calls.append((index, factor))
            values[index].mul_(factor)

    factors = DeferredScale(multiply)
    for index, factor in ((0, 0.25), (0, 0.1), (1, 0.3), (0, 0.7), (1, 2.0), (2, 1.0)):
        factors.add(index, factor)
        expected[index].mul_(factor)
    assert calls == [(0, 0.25 * 0.1), (1, 0.3)]  # before the next that rounds; a power of two joins any
    assert (factors.of(0), factors.of(1), factors.of(2)) == (0.7, 2.0, 1.0)
    factors.carry_out()
    assert all(torch.equal(values[index], expected[index]) for index in values)
    assert len(calls) == 4 and factors.of(0) == 1.0  # none for a factor of one


def test_only_what_rounds_is_carried_out_before_a_look() -> None:
    calls: list[tuple[int, float]] = []
    factors = DeferredScale(lambda indices, factor: calls.extend((index, factor) for index in indices))
    factors.add(0, 0.5)
    factors.carry_out_those_that_round()
    assert calls == []
    factors.add(1, 3.0)
    factors.drop(0)
    factors.carry_out_those_that_round()
    assert calls == [(1, 3.0)]
    factors.add(2, 3.0)
    factors.clear()
    factors.carry_out()
    assert calls == [(1, 3.0)]


def test_parameters_with_one_factor_are_multiplied_at_once() -> None:
    calls: list[tuple[list[int], float]] = []
    factors = DeferredScale(lambda indices, factor: calls.append((list(indices), factor)))
    for index, factor in enumerate((0.3, 0.7, 0.3, 1.0)):
        factors.add(index, factor)
    factors.carry_out()
    assert calls == [([0, 2], 0.3), ([1], 0.7)]
