"""Offloading from one CUDA device: trained with state on the host is as trained with state on the device."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda import nccl  # noqa: F401
from tests.models import build, loss_fn, make_batch, param_groups
from zero_strategy import ops
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.offload.tier import DeviceCopies, HostMemory, HostTier, forget_cuda_error
from zero_strategy.optim.full_state import safe_get_full_grad

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


LARGE, BATCH, DEPTH = 4096, 32768, 8


def large_engine(**settings: Any) -> tuple[ZeroEngine, torch.nn.Module, torch.optim.Optimizer]:
    """Units that compute for longer than their parameters are on their way."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(LARGE, LARGE) for _ in range(DEPTH)])
    units = {"classes": ["Linear"], "min_numel": 0}
    engine = ZeroEngine(model, load_config(units=units, **settings), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    return engine, model, optimizer


def on_host(*kinds: str) -> dict[str, Any]:
    return {"offload": {"optimizer": "cpu", **dict.fromkeys(kinds, "cpu")}}


OFF: list[dict[str, Any]] = [
    {"stage": 2, **on_host("gradients")},
    {"stage": 3, **on_host("parameters")},
    {"stage": 3, **on_host("parameters", "gradients")},
]


@pytest.mark.parametrize("settings", OFF, ids=str)
def test_the_host_is_ahead_in_forward_and_backward(nccl: object, settings: dict[str, Any]) -> None:  # noqa: F811
    """Nothing waits: when all is queued, the device still computes; no call synchronises with it."""
    _engine, model, optimizer = large_engine(**settings)
    x = torch.randn(BATCH, LARGE, device="cuda", dtype=torch.bfloat16)
    for step in range(3):
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for _ in range(2):  # the second one is added to the first
                model(x).square().mean().backward()
                queued = torch.cuda.Event()
                queued.record()
                assert not step or not queued.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step == 1:
            optimizer.step()
        optimizer.zero_grad()


def test_offloaded_gradients_have_the_same_bits(nccl: object) -> None:  # noqa: F811
    """Sums of three micro-batches, added on the device and kept on the host, beside sums kept on the device."""
    found = []
    for more in ({}, on_host("gradients")):
        engine, model, _ = large_engine(stage=2, gradient_reduction="per_micro_batch", **more)
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(512, LARGE, device="cuda", dtype=torch.bfloat16)
            model(x).square().mean().backward()
        gradients = [safe_get_full_grad(parameter) for parameter in model.parameters()]
        found.append([gradient.cpu() for gradient in gradients if gradient is not None])
        engine.close()
        del engine, model
        torch.cuda.empty_cache()
    assert len(found[0]) == 2 * DEPTH and all(map(torch.equal, *found))


def test_gpu_offload_failed_registration_leaves_no_error() -> None:
    """CUDA keeps the code of a failed call, and the next launch of a kernel would raise it."""
    memory = HostMemory(1 << 20, pinned=True)
    assert memory.pinned
    torch.ones(4, device="cuda").add_(1)
    code = int(torch.cuda.cudart().cudaHostRegister(memory.bytes.data_ptr(), memory.nbytes, 0))
    assert code  # it is registered already
    forget_cuda_error()
    torch.ones(4, device="cuda").add_(1)
    torch.cuda.synchronize()
    memory._pin()  # the same through our own code
    assert "failed with error" in memory.reason
    assert bool((torch.ones(4, device="cuda") + 1 == 2).all())


def test_records_are_registered_in_regions() -> None:
    host = HostTier(pinned=True)
    sizes = {str(number): 5_000 + number for number in range(1000)}
    host.reserve(sizes)
    copies = DeviceCopies(torch.device("cuda"))
    target = torch.empty(5_000, dtype=torch.uint8, device="cuda")
    for number in (0, 499, 999):
        memory = host.resident(str(number))
        assert memory is not None
        memory.fill_(number % 251)
        copies.up(memory[:5_000], target, keep=False).on_device()
        assert bool((target == number % 251).all())
    host.close()
