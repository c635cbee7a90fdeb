"""Offloading from one CUDA device: trained with state on the host is as trained with state on the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.gpu.test_cuda import nccl  # noqa: F401
from tests.models import build, loss_fn, make_batch, param_groups
from zero_strategy import ops
from zero_strategy.engine import ZeroEngine
from zero_strategy.offload.tier import DeviceCopies, HostMemory

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_trains_alike(nccl: object, tmp_path: Path, stage: int, tier: str) -> None:  # noqa: F811
    model = build("transformer").cuda()
    offload = {
        "optimizer": tier,
        "parameters": tier if stage == 3 else "none",
        "nvme_path": [str(tmp_path)],
        "staging_bytes": 1 << 16,
        "probe_seconds": 0,
    }
    has_kernels = ops.ensure("cuda").path is not None
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
        # Without the library the steps on the device are torch's, which round otherwise; the model computes in bf16.
        assert losses[0] == pytest.approx(losses[1], abs=1e-6 if has_kernels else 1e-3)
    engines[1].save(tmp_path / "saved")
    engines[0].load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(*(e.full_state_dict().values() for e in engines), strict=True))


def test_copies_beside_computing() -> None:
    """Values that are computed late, copied down, changed on the host, and copied up to where they are read at once."""
    device = torch.device("cuda")
    copies, pinned = DeviceCopies(device), HostMemory(4 << 20, pinned=True)
    host = pinned.bytes.view(torch.float32)
    matrix = torch.eye(2048, device=device)
    for turn in range(20):
        value = torch.full((1 << 20,), float(turn), device=device)
        for _ in range(5):  # the value is ready long after the copy was asked for
            matrix = matrix @ matrix
        value = value * matrix[0, 0]
        landing = copies.down(value, host)
        del value  # its memory may be used again, but not before it was copied
        torch.full((1 << 20,), -1.0, device=device)
        landing.on_host()
        assert bool((host == turn).all())
        host.add_(1)
        target = torch.empty(1 << 20, device=device)
        landing = copies.up(host, target)
        landing.on_device()
        assert bool((target == turn + 1).all())
        landing.on_host()


def test_a_save_in_the_background_of_state_in_files(nccl: object, tmp_path: Path) -> None:  # noqa: F811
    """Weights on the device are copied into files at once, while the steps that follow change them."""
    module = build("transformer").cuda()
    offload = {"optimizer": "nvme", "nvme_path": [str(tmp_path / "state")], "probe_seconds": 0}
    engine = ZeroEngine(module, {"stage": 2, "offload": offload}, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(param_groups(module))
    engine.attach(optimizer)
    for step in range(4):
        batch = make_batch("transformer", step, 4)
        loss_fn(module, type(batch)(batch.inputs.cuda(), batch.targets.cuda())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            engine.save(tmp_path / "now")
            pending = engine.save(tmp_path / "later", asynchronous=True)
    pending.wait()
    files = sorted(path.relative_to(tmp_path / "now") for path in (tmp_path / "now").rglob("*.safetensors"))
    assert files and all((tmp_path / "now" / f).read_bytes() == (tmp_path / "later" / f).read_bytes() for f in files)
