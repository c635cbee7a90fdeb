"""The CUDA kernels of layers and quantisation against their references on the CPU, at any alignment and row length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.native import FLOATS, same_bits, spread
from tests.ops.test_bias_ops import ERROR as BIAS_ERROR
from tests.ops.test_normalization_ops import ERROR as NORM_ERROR
from tests.ops.test_normalization_ops import arguments
from tests.ops.test_softmax_ops import ERROR as SOFTMAX_ERROR
from tests.ops.test_softmax_ops import mask_of, scores
from zero_strategy import ops
from zero_strategy.ops import dropout as d
from zero_strategy.ops import fused_activation as g
from zero_strategy.ops import normalization as n
from zero_strategy.ops import quantization as q
from zero_strategy.ops import softmax as s
from zero_strategy.ops.philox import WORD, keep_scale, philox

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES = [(0, 5), (1, 1), (9, 3), (300, 33), (70, 777), (2000, 64), (130, 1024), (33, 4096), (5, 9001), (2, 70_000)]
STATE = ops.random_state(11, 12)


@pytest.fixture(autouse=True)
def native() -> None:
    """Build and load the CUDA kernels; a machine without nvcc has nothing to compare."""
    status = ops.ensure(DEVICE)
    if status.path is None:
        pytest.skip(f"no native ops: {status.reason}")


def there(value: Any, shift: int = 0) -> Any:
    """Tensors on the device, beginning `shift` elements behind an aligned address; other values as they are."""
    if not isinstance(value, Tensor) or value is STATE:
        return value
    room = torch.empty(value.numel() + shift, dtype=value.dtype, device=DEVICE)[shift:].view(value.shape)
    return room.copy_(value)


def both(call: Callable[..., Any], reference: Callable[..., Any], *values: Any) -> tuple[Any, Any]:
    """What the kernel returns, moved to the CPU, and what the reference does; three alignments give the same bits."""
    found = []
    for shift in (0, 1, 5):
        results = call(*(there(value, shift) for value in values))
        results = (results,) if isinstance(results, Tensor) else results
        assert all(result.device.type == torch.device(DEVICE).type for result in results)
        found.append([result.cpu() for result in results])
    assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    expected = reference(*values)
    return found[0], [expected] if isinstance(expected, Tensor) else list(expected)


def spreads(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread(generator, torch.Size(shape).numel(), dtype, wild=True).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight bias"])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, centered: bool, affine: str) -> None:
    x, weight, bias, gradient = arguments(*shape, dtype, torch.float32)
    w, b = weight if "weight" in affine else None, bias if "bias" in affine else None
    for invertible in (False, True):
        found = both(n._forward, n._forward_reference, x, w, b, shape[1], 1e-5, centered, invertible)
        torch.testing.assert_close(*found, rtol=NORM_ERROR[dtype] / 2, atol=NORM_ERROR[dtype] / 2)
        output, mean, rstd = found[0]
        saved = output if invertible else x
        values = (gradient, saved, mean, rstd, w, b, shape[1], centered, invertible)
        error = NORM_ERROR[torch.float32] + NORM_ERROR[dtype]
        scale = 1 + float(rstd.max()) if shape[0] else 1.0
        torch.testing.assert_close(*both(n._backward, n._backward_reference, *values), rtol=error, atol=scale * error)


def test_a_weight_near_zero_is_refused() -> None:
    x, weight, bias, _ = map(there, arguments(4, 32, torch.float32, torch.bfloat16))
    ops.layer_norm(x, 32, weight, bias, invertible=True)
    weight[5] = -1e-4
    with pytest.raises(RuntimeError, match=r"weight\[5\] is -0.0001.*, too near to zero for invertible=True"):
        ops.layer_norm(x, 32, weight, bias, invertible=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parameter", [None, *FLOATS])
def test_bias_ops(shape: tuple[int, int], dtype: torch.dtype, parameter: torch.dtype | None) -> None:
    x, gradient = (scores(seed, shape, dtype) for seed in (0, 1))
    bias = None if parameter is None else scores(2, shape[1:], parameter)
    error, of_sum = BIAS_ERROR[dtype], BIAS_ERROR[parameter or dtype]
    for tanh in (False, True):
        found = both(g._forward, g._forward_reference, x, bias, tanh)
        torch.testing.assert_close(*found, rtol=error, atol=error * 5)
        ours, theirs = both(g._backward, g._backward_reference, gradient, x, bias, tanh)
        torch.testing.assert_close(ours[0], theirs[0], rtol=error * 2, atol=error * 20)
        # torch's gelu is another formula, and a sum has the errors of all rows
        torch.testing.assert_close(ours[1], theirs[1], rtol=of_sum, atol=of_sum * max(20, shape[0] / 10))
    for p in (0.0, 0.3, 1.0):
        wild = spreads(3, shape, dtype)
        ours, theirs = both(d._forward, d._forward_reference, wild, bias, gradient, STATE, p)
        assert same_bits(ours[0], theirs[0])
        ours, theirs = both(d._backward, d._backward_reference, gradient, bias, STATE, p, dtype)
        assert same_bits(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], rtol=of_sum, atol=of_sum)


@pytest.mark.parametrize("shape", [(3, 4, 17, 16), (2, 3, 40, 1030), (3, 0), (1, 1), (300, 33), (5, 2500), (2, 70_000)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ones", [None, 0, 1, 4, 5, 8, 10])
def test_softmax(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, ones: int | None) -> None:
    """`ones`: which dimensions of the mask are 1 (see mask_of), None: no mask."""
    x, gradient = scores(0, shape, dtype), scores(1, shape, dtype)
    mask = None if ones is None else mask_of(2, shape, torch.float32, ones)
    error = SOFTMAX_ERROR[dtype]
    for p in (0.0, 0.2):
        found = both(s._forward, s._forward_reference, x, mask, STATE, causal, p)
        torch.testing.assert_close(*found, rtol=error * 4, atol=error, equal_nan=True)
        probabilities = found[0][1 if p else 0]
        found = both(s._backward, s._backward_reference, gradient, probabilities, STATE, p)
        torch.testing.assert_close(*found, rtol=error * 4, atol=error * 10, equal_nan=True)


@pytest.mark.parametrize("numel", [0, 1, 7, 33, 1025, 200_001])
@pytest.mark.parametrize("block", [2, 6, 256, 2048, 100_000])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantization_gives_the_bits_of_its_reference(numel: int, block: int, bits: int, dtype: torch.dtype) -> None:
    x = spreads(0, (numel,), dtype)
    for scale in FLOATS:
        ours, theirs = both(q._quantize, q._quantize_reference, x, bits, block, scale)
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
        ours, theirs = both(q._dequantize, q._dequantize_reference, *ours, numel, block, dtype)
        assert same_bits(ours[0], theirs[0])
    codes, scales = q._quantize_reference(x, bits, block, torch.float32)
    found = [
        call([move(codes)] * 3, [move(scales)] * 3, numel, block).cpu()
        for call, move in ((q._reduce, there), (q._reduce_reference, lambda tensor: tensor))
    ]
    assert same_bits(*found)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Every layer op with its derivative."""
    leaf = x.detach().requires_grad_()
    y = ops.layer_norm(leaf, x.shape[-1], weight, bias)
    y = ops.bias_dropout_residual(ops.bias_gelu(y, bias), bias, y, 0.2, STATE)
    y = ops.masked_softmax_dropout(y, bias, causal=True, p=0.1, state=STATE)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (leaf, weight, bias))]


def test_layers_run_on_the_current_stream_and_give_the_same_bits_again() -> None:
    """A graph records what is enqueued on its stream, and refuses whatever would wait for the device."""
    x = there(scores(0, (3, 100, 520), torch.bfloat16))
    weight, bias = (there(scores(seed, (520,), torch.float32)).requires_grad_() for seed in (1, 2))
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


def test_more_elements_than_fit_into_32_bits() -> None:
    columns = 4104
    rows = 2**31 // columns + 3
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs 20 GiB of free memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = there(scores(0, (2, columns), torch.bfloat16))
    ones = torch.ones(columns, device=DEVICE)
    found = [ops.layer_norm(part, columns, ones) for part in (x, x[-2:])]
    assert torch.equal(found[0][-2:], found[1]) and not bool(found[0][:-2].any())
    found = [ops.masked_softmax_dropout(part)[-2:] for part in (x, x[-2:])]
    assert torch.equal(*found)
    codes, scales = ops.quantize_blocks(x[-2:], block_size=columns)
    found = list(ops.quantize_blocks(x, block_size=columns))
    assert torch.equal(found[0][-2 * columns :], codes) and torch.equal(found[1][-2:], scales)
    x[-2:] = 1
    sums = d._backward(x, ones, STATE, 0.25, x.dtype)
    seed, offset = STATE.tolist()
    blocks = torch.arange((rows - 2) * columns // 4, rows * columns // 4)
    words = torch.stack(philox(blocks & WORD, blocks >> 32, *torch.tensor([offset, 0]), seed=seed), 1).view(2, columns)
    expected = (words >= 2**30) * keep_scale(0.25)
    assert torch.equal(sums[0][-2:].cpu(), expected.bfloat16()) and torch.equal(sums[1].cpu(), expected.sum(0))
