"""Attention of divided sequences, and layers by tiles, with the kernels of a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.sequence.test_attention import KINDS, masked
from zero_strategy.sequence.tiling import tiled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_float64(kind: str, width: int) -> None:
    """One rank: pieces of the kernels, merged, forward and backward; grouped queries, rows that see nothing."""
    for dtype, bound in ((torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)):
        found = masked(kind, 1, dtype, width, "cuda")
        assert len(found) == 4 and max(found) <= bound, (dtype, found)


def test_tiles_keep_inputs_and_outputs_alone() -> None:
    layers = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256)).cuda()
    inner = 8192 * 4096 * 4  # bytes of the inner layer, of all tokens
    found = []
    for tokens in (8192, 512):
        model, x = copy.deepcopy(layers), torch.randn(1, 8192, 256, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tiled(model, x, tokens).square().sum().backward()
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[0] > 2 * inner > 3 * found[1]
