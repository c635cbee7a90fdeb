"""The CUDA kernels of layers and quantisation against their references on the CPU, at any alignment and row length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.layer_checks import STATE, Compared, there
from tests.ops.native import FLOATS, same_bits
from tests.ops.test_normalization_ops import arguments
from tests.ops.test_softmax_ops import scores
from zero_strategy import ops
from zero_strategy.ops import fused_layers as d
from zero_strategy.ops.fused_layers import WORD, keep_scale, philox

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES = [(0, 5), (1, 1), (9, 3), (300, 33), (70, 777), (2000, 64), (130, 1024), (33, 4096), (5, 9001), (2, 70_000)]
COMPARED = Compared(DEVICE)


@pytest.fixture(autouse=True)
def native() -> None:
    """Build and load the CUDA kernels; a machine without nvcc has nothing to compare."""
    status = ops.ensure(DEVICE)
    if status.path is None:
        pytest.skip(f"no native ops: {status.reason}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight bias"])
def test_gpu_layers_norms(shape: tuple[int, int], dtype: torch.dtype, centered: bool, affine: str) -> None:
    COMPARED.norms(shape, dtype, centered, affine)


def test_gpu_layers_weight_near_zero_is_refused() -> None:
    x, weight, bias, _ = (there(part, DEVICE) for part in arguments(4, 32, torch.float32, torch.bfloat16))
    ops.layer_norm(x, 32, weight, bias, invertible=True)
    weight[5] = -1e-4
    with pytest.raises(RuntimeError, match=r"weight\[5\] is -0.0001.*, too near to zero for invertible=True"):
        ops.layer_norm(x, 32, weight, bias, invertible=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parameter", [None, *FLOATS])
def test_bias_ops(shape: tuple[int, int], dtype: torch.dtype, parameter: torch.dtype | None) -> None:
    COMPARED.bias_ops(shape, dtype, parameter)


@pytest.mark.parametrize("shape", [(3, 4, 17, 16), (2, 3, 40, 1030), (3, 0), (1, 1), (300, 33), (5, 2500), (2, 70_000)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ones", [None, 0, 1, 4, 5, 8, 10])
def test_softmax(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, ones: int | None) -> None:
    COMPARED.softmax(shape, dtype, causal, ones)


@pytest.mark.parametrize("numel", [0, 1, 7, 33, 1025, 200_001])
@pytest.mark.parametrize("block", [2, 6, 256, 2048, 100_000])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantization_gives_the_bits_of_its_reference(numel: int, block: int, bits: int, dtype: torch.dtype) -> None:
    COMPARED.quantization(numel, block, bits, dtype)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Every layer op with its derivative."""
    leaf = x.detach().requires_grad_()
    y = ops.layer_norm(leaf, x.shape[-1], weight, bias)
    y = ops.bias_dropout_residual(ops.bias_gelu(y, bias), bias, y, 0.2, STATE)
    y = ops.masked_softmax_dropout(y, bias, causal=True, p=0.1, state=STATE)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (leaf, weight, bias))]


def test_layers_run_on_the_current_stream_and_give_the_same_bits_again() -> None:
    """A graph records what is enqueued on its stream, and refuses whatever would wait for the device."""
    x = there(scores(0, (3, 100, 520), torch.bfloat16), DEVICE)
    weight, bias = (there(scores(seed, (520,), torch.float32), DEVICE).requires_grad_() for seed in (1, 2))
    expected = layer(x, weight, bias)
    assert all(same_bits(a, b) for _ in range(3) for a, b in zip(expected, layer(x, weight, bias), strict=True))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer(x, weight, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(x, weight, bias)
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip(expected, recorded, strict=True))


def test_gpu_layers_more_elements_than_fit_into_32_bits() -> None:
    columns = 4104
    rows = 2**31 // columns + 3
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs 20 GiB of free memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = there(scores(0, (2, columns), torch.bfloat16), DEVICE)
    ones = torch.ones(columns, device=DEVICE)
    found = [ops.layer_norm(part, columns, ones) for part in (x, x[-2:])]
    assert torch.equal(found[0][-2:], found[1]) and not bool(found[0][:-2].any())
    found = [ops.masked_softmax_dropout(part)[-2:] for part in (x, x[-2:])]
    assert torch.equal(*found)
    codes, scales = ops.quantize_blocks(x[-2:], block_size=columns)
    found = list(ops.quantize_blocks(x, block_size=columns))
    assert torch.equal(found[0][-2 * columns :], codes) and torch.equal(found[1][-2:], scales)
    x[-2:] = 1
    sums = d._dropout_backward(x, ones, STATE, 0.25, x.dtype)
    seed, offset = STATE.tolist()
    blocks = torch.arange((rows - 2) * columns // 4, rows * columns // 4)
    words = torch.stack(philox(blocks & WORD, blocks >> 32, *torch.tensor([offset, 0]), seed=seed), 1).view(2, columns)
    expected = (words >= 2**30) * keep_scale(0.25)
    assert torch.equal(sums[0][-2:].cpu(), expected.bfloat16()) and torch.equal(sums[1].cpu(), expected.sum(0))
