"""The transformer layer and the loss over a vocabulary on a GPU: what the CPU computes, masks included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.transformer_layer import peak_bytes
from tests.compat.transformer.test_layer import DROPOUT, LLAMA, SAVING, error, inputs, layer
from zero_strategy import ops
from zero_strategy.sequence.tiling import linear_cross_entropy

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def native() -> None:
    """Build and load the CUDA kernels; a machine without nvcc has nothing to compare."""
    status = ops.ensure(DEVICE)
    if status.path is None:
        pytest.skip(f"no native ops: {status.reason}")


def results(device: str, dtype: torch.dtype, options: dict[str, Any], compiled: bool = False) -> list[Tensor]:
    """Output and gradients."""
    made = layer(**options).to(device, dtype)
    x, gradient = inputs(torch.float32)
    leaf = x.detach().to(device, dtype).requires_grad_()
    torch.manual_seed(3)
    output = (torch.compile(made) if compiled else made)(leaf)
    parameters = list(made.parameters())
    found = [output, *torch.autograd.grad(output, [leaf, *parameters], gradient.to(device, dtype))]
    return [part.detach().cpu() for part in found]


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["bert", "llama"])
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["", "dropout"])
def test_the_cpu_computes_the_same(saving: bool, family: dict[str, Any], dropout: dict[str, Any]) -> None:
    options = {**dict.fromkeys(SAVING, saving), **family, **dropout}
    expected = results("cpu", torch.float32, options)
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
        for a, b in zip(results(DEVICE, dtype, options), expected, strict=True):
            assert error(a, b.double(), 1e-3 * float(expected[1].norm())) <= most


def test_compiled_by_inductor() -> None:
    options = {**dict.fromkeys(SAVING, True), **LLAMA}
    plain, compiled = (results(DEVICE, torch.float32, options, compiled) for compiled in (False, True))
    assert all(error(a, b.double()) <= 1e-5 for a, b in zip(compiled, plain, strict=True))


def test_the_loss_takes_a_quarter_of_the_memory() -> None:
    hidden, weight = (torch.randn(rows, 512, device=DEVICE).bfloat16().requires_grad_() for rows in (4096, 32_000))
    target = torch.randint(32_000, (4096,), device=DEVICE)
    found: dict[str, list[Tensor]] = {}

    def ours() -> None:
        loss = linear_cross_entropy(hidden, weight, target)
        found["ours"] = list(torch.autograd.grad(loss, (hidden, weight)))

    def plain() -> None:
        logits = torch.nn.functional.linear(hidden, weight).float()
        loss = torch.nn.functional.cross_entropy(logits, target)
        found["plain"] = list(torch.autograd.grad(loss, (hidden, weight)))

    for step in (ours, plain):
        step()  # workspaces of cuBLAS
    assert peak_bytes(ours, DEVICE) <= 0.25 * peak_bytes(plain, DEVICE)
    assert all(error(a.cpu(), b.cpu().double()) <= 2e-2 for a, b in zip(found["ours"], found["plain"], strict=True))
