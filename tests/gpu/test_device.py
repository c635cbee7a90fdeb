"""The engine's device on a real GPU: its name, what moves, threads, captures, the kernels that take a width."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.test_cuda import nccl  # noqa: F401
from zero_strategy.engine import ZeroEngine
from zero_strategy.offload.tier import HostMemory
from zero_strategy.runtime.compute_device import _exchange_of_capture_modes, beside_captures, bytes_beside_torch
from zero_strategy.runtime.torch_private import attention_backward, attention_forward

pytestmark = pytest.mark.gpu


def test_all_states_leave_a_device_that_was_named_without_index() -> None:
    gc.collect()
    torch.ones(2, 512, device="cuda") @ torch.ones(512, 512, device="cuda")  # cuBLAS takes what it keeps for itself
    torch.nn.functional.linear(*(torch.ones(512, 512, device="cuda") for _ in range(2)), torch.ones(512, device="cuda"))
    others = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    engine = ZeroEngine(model, {"stage": 2}, device=torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    model(torch.ones(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    assert engine.device == torch.device("cuda", torch.cuda.current_device())
    held = torch.cuda.memory_allocated() - others
    engine.offload_states()
    assert torch.cuda.memory_allocated() - others < held // 4
    engine.reload_states()
    model(torch.ones(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    engine.close()


def test_a_snapshot_in_the_background_is_of_its_moment(tmp_path: Path) -> None:
    """The copies are queued behind seconds of work, and the weights change as soon as they are."""
    model = nn.Linear(2048, 2048, device="cuda")
    engine = ZeroEngine(model, {"stage": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.attach(optimizer)
    busy = torch.eye(4096, device="cuda")
    for turn in range(3):
        for _ in range(50):
            busy = busy @ busy
        with torch.no_grad():
            model.weight.fill_(float(turn)).mul_(busy[0, 0])
        saved = engine.save(tmp_path / f"{turn}", asynchronous=True)
        with torch.no_grad():
            model.weight.fill_(-1.0)
        saved.wait()
        engine.load(tmp_path / f"{turn}")
        assert bool((model.weight == turn).all())
    engine.close()


def test_host_memory_is_registered_in_a_thread_of_its_own() -> None:
    torch.empty(1, device="cuda")
    made: list[HostMemory] = []
    thread = threading.Thread(target=lambda: made.append(HostMemory(1 << 20, pinned=True)))
    thread.start()
    thread.join()
    assert made[0].pinned and made[0].bytes.is_pinned()


def test_events_are_asked_while_another_thread_captures() -> None:
    assert _exchange_of_capture_modes() is not None
    stream, x = torch.cuda.Stream(priority=-1), torch.ones(1 << 20, device="cuda")
    event, over, asked = stream.record_event(), threading.Event(), [0]

    def ask() -> None:
        while not over.is_set():
            with beside_captures():
                event.query()
            asked[0] += 1

    thread = threading.Thread(target=ask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    thread.start()
    try:
        with torch.cuda.graph(graph):
            y = x
            for _ in range(2000):
                y = y + 1
    finally:
        over.set()
        thread.join()
    graph.replay()
    assert bool((y == 2001).all()) and asked[0] > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [30, 36, 64, 200, 256, 264, 320])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_take_any_width(width: int, dtype: torch.dtype, causal: bool) -> None:
    source = torch.Generator("cuda").manual_seed(width)
    shape, scale = (2, 3, 96, width), width**-0.5
    q, k, v, grad = (torch.randn(shape, generator=source, device="cuda").to(dtype) for _ in range(4))
    out, lse, rest = attention_forward(q, k, v, causal, scale)
    found = attention_backward(grad, q, k, v, out, lse, causal, scale, rest)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(96, 96, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    wanted = scores.softmax(-1) @ leaves[2]
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-3
    assert torch.allclose(out.double(), wanted, atol=bound, rtol=bound)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=bound)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, grad.double()), strict=True):
        assert one.shape == q.shape and torch.allclose(one.double(), other, atol=4 * bound, rtol=bound)


def test_memory_of_a_communicator_is_seen(nccl: object) -> None:  # noqa: F811
    """Of one rank, which is the least; `pytest -s` prints it. What else runs on the device is seen, too."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    before = bytes_beside_torch(device)
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    taken = bytes_beside_torch(device) - before
    print(f"\na communicator of one rank: {taken / 2**20:.1f} MiB beside torch's allocator")
    assert taken < 2**30
