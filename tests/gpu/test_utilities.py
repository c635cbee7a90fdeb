"""Utilities on a device: scratch memory, figures of memory, ranges, deferred gradients, symmetric memory."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.test_cuda import nccl
from zero_strategy.compat.megatron.diagnostics import NvtxRanges
from zero_strategy.compat.megatron.gradients import clip_grad_norm_, drain_embedding_wgrad_compute
from zero_strategy.compat.megatron.tensors import GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from zero_strategy.diagnostics import recorder as memory_use
from zero_strategy.diagnostics.recorder import MemoryUse, get_ma_status, see_memory_usage

pytestmark = pytest.mark.gpu
__all__ = ["nccl"]


def test_scratch_is_on_the_current_device_and_figures_count_it(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what other tests have left would go meanwhile
    before, scratch = get_ma_status(), GlobalMemoryBuffer()
    held = scratch.get_tensor((1 << 20,), torch.float32, "a")
    assert held.device == torch.device("cuda", torch.cuda.current_device())
    assert get_ma_status() - before == 4 << 20
    with caplog.at_level(logging.INFO, logger=memory_use.__name__):
        see_memory_usage("with a buffer")
    assert "device memory: allocated" in caplog.text
    assert MemoryUse.now().max_allocated == get_ma_status()  # peaks begin anew
    del held
    scratch.clear()
    see_memory_usage("without it", force=True)
    assert get_ma_status() == before


def test_ranges_open_and_close() -> None:
    ranges = NvtxRanges(enabled=True)

    @ranges.decorator(color="blue")
    def work() -> torch.Tensor:
        ranges.push("inside")
        made = torch.ones(3, device="cuda") + 1
        ranges.pop("inside")
        return made

    assert work().sum() == 6 and ranges.messages == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_put_off_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(16, 8, device="cuda", dtype=dtype))
    weight.main_grad = torch.zeros(16, 8, device="cuda")  # type: ignore[attr-defined]
    inputs = [torch.randn(32, 8, device="cuda", dtype=dtype) for _ in range(3)]
    gradients = [torch.randn(32, 16, device="cuda", dtype=dtype) for _ in range(3)]
    wanted = sum(g.double().t() @ x.double() for g, x in zip(gradients, inputs, strict=True))
    config = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=True)
    drain_embedding_wgrad_compute(config, inputs, gradients, weight, None)
    torch.testing.assert_close(weight.main_grad.double(), wanted, rtol=1e-3, atol=1e-3)  # type: ignore[attr-defined]


def test_clipping_is_torch_s() -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(5, device="cuda"))] for _ in range(2))
    for parameters in (ours, theirs):
        parameters[0].grad = torch.arange(5.0, device="cuda")
    assert clip_grad_norm_(ours, 1.0) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, 1.0)))
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)


def test_symmetric_memory_is_there_or_says_why_not(nccl: object) -> None:
    buffer = GlobalSymmetricMemoryBuffer(1, dist.group.WORLD)
    found = buffer.maybe_get_tensor((4, 4), torch.float32)
    assert (found is None) is (buffer.reason is not None)
    if found is not None:
        assert found.fill_(1.0).sum() == 16 and buffer.maybe_get_tensor((1 << 20,), torch.float32) is None
