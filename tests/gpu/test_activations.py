"""Recomputation and offloaded activations on one CUDA device: the gradients of a model that keeps everything there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.activation.unit_nets import Transformer, seeded
from tests.engine.nets import loss_of
from tests.gpu.test_cuda import nccl  # noqa: F401
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_grad

pytestmark = pytest.mark.gpu

WIDTH = 128
MODES: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "every_n", "every_n": 2},
    {"mode": "budget", "budget": 0.6},
]


def gradients(mode: dict[str, Any], tier: str, dtype: torch.dtype | None = None) -> tuple[list[torch.Tensor], int]:
    """Of the second step's backward, and the bytes that its forward leaves on the device."""
    torch.manual_seed(3)
    model = seeded(Transformer, 6, WIDTH).cuda()
    config = load_config(stage=3, activation_checkpointing=mode, offload={"activations": tier})
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach(optimizer)
    x = torch.randn(8, 256, WIDTH, device="cuda", dtype=dtype)
    for step in range(2):
        optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = loss_of(model(x).float())
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        if not step:
            optimizer.step()
    found = [safe_get_full_grad(p) for p in model.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None], kept


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_modes_and_tiers_have_the_same_gradients(nccl: object, dtype: torch.dtype | None) -> None:  # noqa: F811
    expected, most = gradients(MODES[0], "none", dtype)
    for mode in MODES:
        for tier in ("none", "cpu"):
            found, kept = gradients(mode, tier, dtype)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert kept < 0.9 * most or (mode["mode"], tier) == ("none", "none")


def test_memory_on_the_host_is_page_locked_and_stays(nccl: object) -> None:  # noqa: F811
    model = seeded(Transformer, 4, WIDTH).cuda()
    engine = ZeroEngine(model, load_config(stage=2, offload={"activations": "cpu"}))
    store = engine.activations.store
    assert store is not None
    taken = []
    for _ in range(3):
        loss_of(model(torch.randn(8, 256, WIDTH, device="cuda"))).backward()
        torch.cuda.synchronize()
        taken.append(store.blocks.taken)
    assert taken[0] == taken[1] == taken[2] > 0
    assert engine.ledger().only(category="activations", tier="host").total.taken == taken[0]
