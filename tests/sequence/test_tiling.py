"""Layers over some tokens at a time: values, gradients, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.sequence import tiled


def kept(run: object) -> int:
    """Elements that autograd keeps, of tensors that are no parameters."""
    total: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None) or not tensor.requires_grad:
            total[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    assert callable(run)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(total.values())


@pytest.mark.parametrize("tokens", [1, 3, 7, 100])
def test_tiles_compute_what_the_whole_computes(tokens: int) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).double()
    x, weight = torch.randn(2, 7, 4, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    found = []
    for run in (mlp, lambda x: tiled(mlp, x, tokens)):
        given = x.clone().requires_grad_()
        out = run(given)
        (out * weight).sum().backward()
        found.append([out.detach(), given.grad, *(p.grad for p in mlp.parameters())])
        mlp.zero_grad()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(tiled(mlp, x, tokens), mlp(x), rtol=1e-12, atol=1e-12)


def test_of_a_tiled_layer_inputs_are_kept_alone() -> None:
    mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(1, 32, 8, requires_grad=True)
    inside = x.tanh()  # no leaf, as in a model
    assert kept(lambda: mlp(inside)) >= 32 * 8 + 2 * 32 * 64
    assert kept(lambda: tiled(mlp, inside, 4)) <= 32 * 8


def test_a_layer_may_view_its_tokens_as_one_dimension() -> None:
    """As GPT-2's do; of several samples a tile is a part of each, which no view flattens."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 6, 4)

    def flat(part: Tensor) -> Tensor:
        return layer(part.view(-1, 4)).view(part.shape)

    torch.testing.assert_close(tiled(flat, x, 4), layer(x))


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens=0"):
        tiled(nn.Identity(), torch.ones(1, 2, 3), 0)
