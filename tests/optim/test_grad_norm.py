"""The norm of gradients on one rank: its flag for non-finite numbers is not the norm."""

from __future__ import annotations

import math

import pytest
import torch

from zero_strategy.optim.grad_norm import global_norm


def _norm(values: list[float], order: float, scale: float = 1.0) -> tuple[float, bool]:
    found = global_norm([torch.tensor(values[:1]), torch.tensor(values[1:])], order, [], [scale, scale])
    return found.value, found.finite


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, 12.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_large_finite_numbers_have_a_finite_norm(order: float, scale: float) -> None:
    value, finite = _norm([3e38, -1e38, 2.0], order, scale)
    expected = torch.linalg.vector_norm(torch.tensor([3.0, 1.0, 2e-38], dtype=torch.float64), order) * 1e38 * scale
    assert finite and value == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, 12.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_number_is_flagged(order: float, bad: float) -> None:
    value, finite = _norm([1.0, bad, 3e38], order)
    assert not finite and not math.isfinite(value)
    assert _norm([1.0, 2.0, 3.0], order, bad)[1] is False


@pytest.mark.parametrize("exact", [False, True])
def test_a_norm_beyond_float64_is_infinite(exact: bool) -> None:
    found = global_norm([torch.full((10_000,), 3.0)], 0.01, [], exact=exact)
    assert (found.value, found.finite) == (math.inf, True)


def test_no_gradients_at_all() -> None:
    found = global_norm([], math.inf, [])
    assert (found.value, found.finite) == (0.0, True)
