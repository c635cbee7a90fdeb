"""Choice of torch's attention kernels on a GPU, told by stand-ins that refuse what the kernels refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.gpu_tensor import GpuTensor
from zero_strategy.runtime.torch_private import attention_backward, attention_forward

ROWS = 5


class Kernels:
    """The operators of torch's two families of kernels: what they refuse, and their results by plain products."""

    def __init__(self, patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.called: list[str] = []
        self.widths: set[int] = set()
        self._capability = capability
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for name in ("flash", "efficient"):
            for suffix, stand_in in (("", self._forward), ("_backward", self._backward)):
                full = f"_scaled_dot_product_{name}_attention{suffix}"
                patch.setattr(torch.ops.aten, full, self._named(name + suffix, stand_in), raising=False)

    def _named(self, name: str, stand_in: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.called.append(name)
            return stand_in(name, *args, **options)

        return call

    def _check(self, name: str, *tensors: Tensor) -> None:
        width = tensors[0].shape[-1]
        self.widths.add(width)
        if any(tensor.shape[-1] != width or tensor.shape[-1] % 8 for tensor in tensors):
            raise RuntimeError("query, key and value must have a width that is a multiple of 8")
        if name.startswith("flash") and (width > 256 or self._capability < (8, 0)):
            raise RuntimeError("FlashAttention only supports head dimension at most 256, and Ampere GPUs or newer")

    def _forward(self, name: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
        self._check(name, q, k, v)
        causal = rest[-1]
        out, lse = attend(*(tensor.values.float() for tensor in (q, k, v)), causal, scale)
        out = out.to(q.dtype)
        if name == "flash":
            return GpuTensor(out), GpuTensor(lse), None, None, 0, 0, None, None, None
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        return GpuTensor(out), GpuTensor(padded), None, None

    def _backward(self, name: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
        out, causal = (rest[0], rest[7]) if name.startswith("flash") else (rest[1], rest[-1])
        self._check(name, grad, q, k, v, out)
        leaves = [tensor.values.float().requires_grad_() for tensor in (q, k, v)]
        result, _ = attend(*leaves, causal, scale)
        return [GpuTensor(found) for found in torch.autograd.grad(result, leaves, grad.values.float())]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by plain products."""
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("width", "dtype", "capability", "kernel"),
    [
        (64, torch.bfloat16, (9, 0), "flash"),
        (36, torch.bfloat16, (9, 0), "flash"),
        (250, torch.float16, (8, 0), "flash"),
        (256, torch.bfloat16, (8, 9), "flash"),
        (208, torch.bfloat16, (8, 0), "flash"),
        (208, torch.bfloat16, (8, 9), "efficient"),
        (200, torch.bfloat16, (12, 0), "efficient"),
        (257, torch.bfloat16, (9, 0), "efficient"),
        (320, torch.float16, (9, 0), "efficient"),
        (64, torch.float16, (7, 5), "efficient"),
        (64, torch.float32, (9, 0), "efficient"),
        (30, torch.float32, (9, 0), "efficient"),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_that_takes_the_width(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    kernel: str,
    causal: bool,
) -> None:
    source = torch.Generator().manual_seed(width)
    q, k, v, grad = (torch.randn(1, 2, ROWS, width, generator=source).to(dtype) for _ in range(4))
    scale = width**-0.5
    kernels = Kernels(monkeypatch, capability)
    there = [GpuTensor(tensor) for tensor in (q, k, v)]
    out, lse, rest = attention_forward(*there, causal, scale)
    found = attention_backward(GpuTensor(grad), *there, out, lse, causal, scale, rest)
    assert kernels.called == [kernel, f"{kernel}_backward"] and kernels.widths == {-(-width // 8) * 8}
    leaves = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    wanted, sums = attend(*leaves, causal, scale)
    assert out.shape == q.shape and torch.allclose(out.values.float(), wanted, atol=1e-2)
    assert lse.shape == (1, 2, ROWS) and torch.allclose(lse.values, sums, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, grad.float()), strict=True):
        assert one.shape == q.shape and torch.allclose(one.values, other, atol=1e-4)
