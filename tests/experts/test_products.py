"""Products of rows with the matrices of their experts."""

from __future__ import annotations

import pytest
import torch

from zero_strategy.experts import grouped_linear


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_grouped_products_are_those_of_each_row(rows: int) -> None:
    """Values and gradients; some experts have no row."""
    chance = torch.Generator().manual_seed(0)
    given = torch.randn(rows, 5, generator=chance, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 5, 3, generator=chance, dtype=torch.float64, requires_grad=True)
    experts = torch.randint(0, 4, (rows,), generator=chance)
    out = torch.randn(rows, 3, generator=chance, dtype=torch.float64)
    found = grouped_linear(given, experts, weights)
    wanted = torch.einsum("ri,rio->ro", given, weights[experts])
    assert torch.allclose(found, wanted, rtol=1e-13)
    for one, other in zip(
        torch.autograd.grad((found * out).sum(), (given, weights)),
        torch.autograd.grad((wanted * out).sum(), (given, weights)),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=1e-13)
