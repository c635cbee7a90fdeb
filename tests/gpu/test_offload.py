"""Offloading from one CUDA device: trained with state on the host is as trained with state on the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.gpu.test_cuda import nccl  # noqa: F401
from tests.models import build, loss_fn, make_batch, param_groups
from zero_strategy.engine import ZeroEngine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("early", ["on", "off"])
def test_offloaded_state_trains_alike(
    nccl: object, tmp_path: Path, stage: int, tier: str, early: str  # noqa: F811
) -> None:
    model = build("transformer").cuda()
    offload = {
        "optimizer": tier,
        "parameters": tier if stage == 3 else "none",
        "nvme_path": [str(tmp_path)],
        "staging_bytes": 1 << 16,
        "probe_seconds": 0,
        "early_step": early,
    }
    modules = [copy.deepcopy(model), model]
    engines = [
        ZeroEngine(module, {"stage": stage, "units": {"min_numel": 0}, **more}, compute_dtype=torch.bfloat16)
        for module, more in zip(modules, ({}, {"offload": offload}), strict=True)
    ]
    optimizers = [torch.optim.AdamW(param_groups(module)) for module in modules]
    for engine, optimizer in zip(engines, optimizers, strict=True):
        engine.attach(optimizer)
    for step in range(10):
        batch = make_batch("transformer", step, 4)
        batch = type(batch)(batch.inputs.cuda(), batch.targets.cuda())
        losses = []
        for module, engine, optimizer in zip(modules, engines, optimizers, strict=True):
            loss = loss_fn(module, batch)
            loss.backward()
            engine.clip_grad_norm_(1.0 if step == 6 else 1e9)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    counts = engines[1].early_steps
    assert (counts.committed >= 5 and counts.redone <= 2) if early == "on" else counts.committed == 0
    engines[1].save(tmp_path / "saved")
    engines[0].load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(*(e.full_state_dict().values() for e in engines), strict=True))
