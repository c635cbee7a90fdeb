"""The ledger against what the process takes: model state is found there, the rest is named."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.planning.held import reconcile, resident

WIDTH, DEPTH = 1536, 12
MALLOC_MMAP_THRESHOLD = -3
"""Number of the option of glibc's mallopt."""


def large(depth: int = DEPTH) -> nn.Module:
    """28M parameters, in layers of 2.4M."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Launcher]:
    """Processes that end with these tests, for an option of the C library cannot be taken back."""
    launcher = Launcher()
    yield launcher
    launcher.close()


def given_back() -> int:
    """Resident bytes, once the C library has returned what it keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()[0]


def reset_peak() -> None:
    """Let the kernel count the most resident bytes anew."""
    Path("/proc/self/clear_refs").write_text("5")


def train(stage: int, dtype: torch.dtype | None, model: nn.Module) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    """Three steps; the peak is that of the third."""
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters())
    engine.attach(optimizer)
    batch = torch.ones(1, WIDTH, dtype=dtype)
    for step in range(3):
        if step == 2:
            reset_peak()
        model(batch).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, optimizer


def grown(stage: int, low: bool) -> dict[str, Any]:
    """Growth of the process by an engine that has taken steps, with the plan's and the ledger's bytes."""
    dtype = torch.bfloat16 if low else None
    # Else glibc keeps freed buffers in its heap, and the most that was resident is a matter of its gaps.
    ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 65536)
    train(stage, dtype, large(2))  # code, threads and their memory for layers of this size, as later engines find them
    model = large()
    before = given_back() - 4 * sum(p.numel() for p in model.parameters())
    engine, optimizer = train(stage, dtype, model)
    peak = resident()[1]
    after = given_back()
    with torch.device("meta"):
        shape = large()
    options = {"world_size": engine.mesh.world_size, "compute_dtype": dtype, "optimizer": optimizer}
    plan = load_config(stage=stage).plan(shape, device="cpu", snapshots=False, **options)
    planned = plan.ledger(engine.mesh.rank)
    return {
        "grown": after - before,
        "ledger": engine.ledger().total.taken,
        "held": planned.held().total.taken,
        "peak": peak - before,
        "planned peak": planned.total.taken,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and glibc")
@pytest.mark.parametrize(("stage", "low"), [(1, True), (2, False), (3, True)])
def test_the_process_grows_by_the_plan(own_ranks: Launcher, stage: int, low: bool) -> None:
    for found in own_ranks(2)(grown, stage, low):
        assert found["ledger"] == found["held"]
        assert abs(found["grown"] / found["held"] - 1) < 0.05, found
        assert abs(found["peak"] / found["planned peak"] - 1) < 0.05, found


def test_what_is_left_over_is_named() -> None:
    engine = ZeroEngine(nn.Linear(512, 512), load_config(stage=2))
    found = reconcile(engine)
    (process,) = found.measured
    assert process.known == found.ledger.total.taken == engine.ledger().total.taken
    assert process.other == process.now - process.known > 0
    assert process.peak >= process.now > 0
    text = found.table()
    assert "activations and other" in text and "memory of this process" in text
    assert json.loads(json.dumps(found.to_json()))["measured"][0]["activations and other"] == process.other


@pytest.mark.gpu
def test_the_device_s_allocator_agrees() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = large().cuda()
    engine = ZeroEngine(model, load_config(stage=2), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    engine.attach(optimizer)
    model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device="cuda")).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    device, _ = reconcile(engine).measured
    assert abs(device.other - before) <= 0.01 * device.known
    with torch.device("meta"):
        shape = large()
    plan = load_config(stage=2).plan(
        shape, compute_dtype=torch.bfloat16, optimizer=optimizer, device="cuda", snapshots=False
    )
    assert plan.ledger(0).held().merged() == engine.ledger().merged()
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * (plan.ledger(0).tier_bytes("device"))
