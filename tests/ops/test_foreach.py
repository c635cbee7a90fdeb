"""Ops by torch's multi-tensor kernels, tried on tensors of the CPU: the references' numbers, or those of torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.native import same_bits, spread
from zero_strategy.ops import foreach, multi_tensor, optimizers

SIZES = (15, 0, 70_000, 1, 81)
LOW = torch.bfloat16
DTYPES = [(torch.float32, torch.float32), (torch.float32, LOW), (LOW, torch.float32), (LOW, LOW)]
"""Of gradients, and of states."""


def values(seed: int, dtype: torch.dtype = torch.float32, *, positive: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(size, generator=generator) for size in SIZES]
    return [(each.abs() if positive else each).to(dtype) for each in found]


def table(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def both(
    device: Callable[..., Any], reference: Callable[..., Any], lists: list[list[Tensor]], *arguments: Any
) -> list[tuple[Tensor, Tensor]]:
    """Every tensor after the step of either, side by side."""
    one, other = copy.deepcopy(lists), copy.deepcopy(lists)
    device(*one, *arguments)
    reference(*other, *arguments)
    return [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]


def check(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Equal bits but where torch's root or division on a CPU is off by a bit."""
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == LOW else 1e-6, atol=3e-6)


@pytest.fixture(params=[100, foreach.BATCH], autouse=True)
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(foreach, "BATCH", request.param)
    return int(request.param)


@pytest.mark.parametrize(("gradients", "states"), DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.3])
def test_adam(gradients: torch.dtype, states: torch.dtype, decoupled: bool, scale: float) -> None:
    rows = [[1e-3, 0.9, 0.99, 1e-8, 0.1 if i % 2 else 0.0, 3 + i // 3, scale] for i in range(len(SIZES))]
    lists = [values(0), values(1, gradients), values(2, states), values(3, states, positive=True), values(4, LOW)]
    check(both(foreach.adam, optimizers._adam_reference, lists, table(rows), decoupled))


@pytest.mark.parametrize(("gradients", "states"), DTYPES)
def test_a_step_of_infinity_leaves_moments_uncorrected(gradients: torch.dtype, states: torch.dtype) -> None:
    """Rows of a step so large that both corrections have rounded to 1 give the same bits."""
    lists = [values(0), values(1, gradients), values(2, states), values(3, states, positive=True), values(4, LOW)]
    found = []
    for step in (math.inf, 1e6):
        rows = table([[1e-3, 0.9, 0.99, 1e-8, 0.1, step, 0.3]] * len(SIZES))
        one = copy.deepcopy(lists)
        foreach.adam(*one, rows, True)
        other = copy.deepcopy(lists)
        optimizers._adam_reference(*other, rows, True)
        third = copy.deepcopy(lists)
        optimizers.adam_(*third[:4], rows, decoupled=True, copies=third[4])
        fourth = copy.deepcopy(lists[:4])
        sums = foreach.lamb_direction(*fourth, rows), optimizers.lamb_direction_(*copy.deepcopy(lists[:4]), rows)
        found.append([*(tensor for each in (one, other, third, fourth) for part in each for tensor in part), *sums])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_foreach_adam_has_the_bits_of_torchs_fused_one(
    kind: type[torch.optim.Adam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreach, "BATCH", 1 << 22)  # on a CPU torch's kernel rounds the last elements otherwise
    params, gradients, moments, squares = values(0), values(1), values(2), values(3, positive=True)
    theirs = [torch.nn.Parameter(each.clone()) for each in params]
    optimizer = kind(theirs, lr=1e-3, weight_decay=0.1, fused=True)
    for parameter, gradient, moment, square in zip(theirs, gradients, moments, squares, strict=True):
        parameter.grad = gradient * 0.3
        state = {"step": torch.tensor(6.0), "exp_avg": moment.clone(), "exp_avg_sq": square.clone()}
        optimizer.state[parameter] = state
    optimizer.step()
    before = copy.deepcopy(gradients)
    rows = table([[1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.3]] * len(SIZES))
    foreach.adam(params, gradients, moments, squares, [], rows, kind is torch.optim.AdamW)
    assert all(torch.equal(mine, parameter) for mine, parameter in zip(params, theirs, strict=True))
    assert all(map(torch.equal, gradients, before)), "gradients are read only"


@pytest.mark.parametrize(("gradients", "states"), DTYPES)
def test_lion_and_sgd_have_the_references_bits(gradients: torch.dtype, states: torch.dtype) -> None:
    lists = [values(0), values(1, gradients), values(2, states), values(4, LOW)]
    lists[1][0][3], lists[1][2][7] = math.nan, math.inf
    lion = table([[1e-3, 0.9, 0.99, 0.1, 0.3]] * len(SIZES))
    pairs = both(foreach.lion, optimizers._lion_reference, lists, lion)
    for nesterov in (False, True):
        sgd = table([[1e-3, 0.9, 0.1, 0.1 * (i % 2), i % 2, 0.3] for i in range(len(SIZES))])
        pairs += both(foreach.sgd, optimizers._sgd_reference, lists, sgd, nesterov)
        pairs += both(foreach.sgd, optimizers._sgd_reference, [*lists[:2], [], []], sgd, False)
    assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize(("gradients", "states"), DTYPES)
def test_adagrad_and_lamb(gradients: torch.dtype, states: torch.dtype) -> None:
    params, grads, first, second = values(0), values(1, gradients), values(2, states), values(3, states, positive=True)
    rows = table([[1e-3, 0.1, 1e-10, 0.1 * (i % 2), 2 + i, 0.3] for i in range(len(SIZES))])
    check(both(foreach.adagrad, optimizers._adagrad_reference, [params, grads, second, values(4, LOW)], rows))
    rows = table([[1e-3, 0.9, 0.99, 1e-8, 0.1, 3, 0.3]] * len(SIZES))
    sums: list[Tensor] = []

    def direction(function: Callable[..., Tensor]) -> Callable[..., None]:
        return lambda *arguments: sums.append(function(*arguments))

    lists = [params, grads, first, second]
    check(both(direction(foreach.lamb_direction), direction(optimizers._lamb_direction_reference), lists, rows))
    torch.testing.assert_close(*sums, rtol=1e-6, atol=0.0)
    rates = table([[0.1 * i] for i in range(len(SIZES))])
    lists = [params, first, second, values(4, LOW)]
    check(both(foreach.lamb_apply, optimizers._lamb_apply_reference, lists, rows, rates))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
def test_foreach_norms(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "_COUNTED", 1000)
    generator = torch.Generator().manual_seed(0)
    for tensors in (
        values(0),
        [*values(0), *values(1, LOW), *values(2, torch.float16)],
        [torch.full((3,), 3e38), spread(generator, 5000, torch.float32)],
    ):
        expected, counts = multi_tensor._grad_stats_reference(tensors, order)
        sums, found = foreach.stats_on_host(tensors, order)
        torch.testing.assert_close(sums, expected, rtol=1e-13, atol=0.0)
        assert found.dtype == torch.int64 and torch.equal(found, counts)
        tensors[0][:2] = torch.tensor([math.nan, -math.inf])
        tensors[-1][-1] = math.inf
        expected, counts = multi_tensor._grad_stats_reference(tensors, order)
        sums, found = foreach.stats_on_host(tensors, order)
        assert torch.equal(found, counts) and torch.equal(sums.isfinite(), expected.isfinite())
        assert torch.equal(torch.stack([foreach.count_nonfinite(tensor) for tensor in tensors]), counts)
