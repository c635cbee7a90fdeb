"""Recomputation and offloaded activations on one CUDA device: the gradients of a model that keeps everything there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


ROWS, LARGE, UNITS = 8192, 4096, 24
TENSOR = ROWS * LARGE * 2
UNIT = 2 * TENSOR
"""Bytes that a unit keeps for its backward."""


class Busy(nn.Module):
    """Computes for longer than what it keeps is on its way to the host, and takes the host no time to queue."""

    def __init__(self, scratch: torch.Tensor, matrix: torch.Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(LARGE, device="cuda", dtype=torch.bfloat16))
        self._work = [scratch, matrix]

    def work(self, x: torch.Tensor) -> None:
        scratch, matrix = self._work
        with torch.no_grad():
            for _ in range(16):
                torch.mm(x.detach(), matrix, out=scratch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.work(x)
        y = torch.sin(x * self.gain)
        if y.requires_grad:
            y.register_hook(self.work)
        return y


def busy_engine(tier: str) -> tuple[ZeroEngine, nn.Module]:
    scratch = torch.empty(ROWS, LARGE, device="cuda", dtype=torch.bfloat16)
    matrix = torch.randn(LARGE, LARGE, device="cuda", dtype=torch.bfloat16) / LARGE
    model = nn.Sequential(*[Busy(scratch, matrix) for _ in range(UNITS)])
    config = load_config(stage=2, units={"classes": ["Busy"], "min_numel": 0}, offload={"activations": tier})
    return ZeroEngine(model, config), model


def active(which: str) -> int:
    """Blocks that the allocator cannot hand out, those that wait for a stream included."""
    return int(torch.cuda.memory_stats()[f"active_bytes.all.{which}"])


def test_a_host_that_runs_ahead_does_not_fill_the_device(nccl: object) -> None:  # noqa: F811
    """Two units are planned; at most two more are there at any time, nobody having waited for anything."""
    _engine, model = busy_engine("cpu")
    x = torch.randn(ROWS, LARGE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the first one page-locks memory of the host
        x.grad = None
        torch.cuda.synchronize()
        before = active("current")
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        y = model(x)
        queued = torch.cuda.Event()
        queued.record()
        ahead = not queued.query()
        forward = active("peak") - before
        y.backward(y.detach())
        queued.record()
        backward_ahead = not queued.query()
        both = active("peak") - before
        del y
        torch.cuda.synchronize()
    assert ahead and backward_ahead, "the host was not ahead: nothing is shown"
    assert forward <= (2 + 2) * UNIT, f"{forward / UNIT:.1f} units"
    assert both <= (2 + 2) * UNIT + 3 * TENSOR, f"{both / UNIT:.1f} units"  # with gradients
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries


def test_memory_used_again_in_stream_order_has_the_right_values(nccl: object) -> None:  # noqa: F811
    found = []
    for tier in ("none", "cpu"):
        torch.manual_seed(5)
        _engine, model = busy_engine(tier)
        x = torch.randn(ROWS, LARGE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            x.grad = None
            y = model(x)
            y.backward(torch.ones_like(y))
        assert x.grad is not None
        found.append((y.detach().clone(), x.grad.clone()))
        del y, x, model, _engine
        torch.cuda.empty_cache()
    assert all(map(torch.equal, *found))
