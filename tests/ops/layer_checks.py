"""The layer ops' kernels on a device against their references on the CPU, at three alignments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.ops.native import FLOATS, same_bits, spread
from tests.ops.test_bias_ops import ERROR as BIAS_ERROR
from tests.ops.test_normalization_ops import ERROR as NORM_ERROR
from tests.ops.test_normalization_ops import arguments
from tests.ops.test_softmax_ops import ERROR as SOFTMAX_ERROR
from tests.ops.test_softmax_ops import mask_of, scores
from zero_strategy import ops
from zero_strategy.ops import fused_layers as d
from zero_strategy.ops import fused_layers as g
from zero_strategy.ops import fused_layers as n
from zero_strategy.ops import fused_layers as s
from zero_strategy.ops import quantization as q

STATE = ops.random_state(11, 12)
LONG = (2, 9001)
"""Rows of more elements than the threads of a block keep in registers."""


def there(value: Any, device: str, shift: int = 0) -> Any:
    """Tensors on the device, beginning `shift` elements behind an aligned address; other values as they are."""
    if not isinstance(value, Tensor) or value is STATE:
        return value
    room = torch.empty(value.numel() + shift, dtype=value.dtype, device=device)[shift:].view(value.shape)
    return room.copy_(value)


class Compared:
    """Calls kernels with arguments on one device, and their references with the same ones on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def both(self, call: Callable[..., Any], reference: Callable[..., Any], *values: Any) -> tuple[Any, Any]:
        """Results of the kernel, moved to the CPU, and of the reference; alignment changes no bit."""
        found = []
        for shift in (0, 1, 5):
            results = call(*(there(value, self.device, shift) for value in values))
            results = (results,) if isinstance(results, Tensor) else results
            assert all(result.device.type == self.device for result in results)
            found.append([result.cpu() for result in results])
        assert all(same_bits(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        expected = reference(*values)
        return found[0], [expected] if isinstance(expected, Tensor) else list(expected)

    def norms(self, shape: tuple[int, int], dtype: torch.dtype, centered: bool, affine: str) -> None:
        x, weight, bias, gradient = arguments(*shape, dtype, torch.float32)
        w, b = weight if "weight" in affine else None, bias if "bias" in affine else None
        for invertible in (False, True):
            found = self.both(n._forward, n._forward_reference, x, w, b, shape[1], 1e-5, centered, invertible)
            torch.testing.assert_close(*found, rtol=NORM_ERROR[dtype] / 2, atol=NORM_ERROR[dtype] / 2)
            output, mean, rstd = found[0]
            saved = output if invertible else x
            values = (gradient, saved, mean, rstd, w, b, shape[1], centered, invertible)
            error = NORM_ERROR[torch.float32] + NORM_ERROR[dtype]
            scale = 1 + float(rstd.max()) if shape[0] else 1.0
            torch.testing.assert_close(
                *self.both(n._backward, n._backward_reference, *values), rtol=error, atol=scale * error
            )

    def bias_ops(self, shape: tuple[int, int], dtype: torch.dtype, parameter: torch.dtype | None) -> None:
        x, gradient = (scores(seed, shape, dtype) for seed in (0, 1))
        bias = None if parameter is None else scores(2, shape[1:], parameter)
        error, of_sum = BIAS_ERROR[dtype], BIAS_ERROR[parameter or dtype]
        for tanh in (False, True):
            found = self.both(g._gelu_forward, g._gelu_forward_reference, x, bias, tanh)
            torch.testing.assert_close(*found, rtol=error, atol=error * 5)
            ours, theirs = self.both(g._gelu_backward, g._gelu_backward_reference, gradient, x, bias, tanh)
            torch.testing.assert_close(ours[0], theirs[0], rtol=error * 2, atol=error * 20)
            # torch's gelu is another formula, and a sum has the errors of all rows
            torch.testing.assert_close(ours[1], theirs[1], rtol=of_sum, atol=of_sum * max(20, shape[0] / 10))
        for p in (0.0, 0.3, 1.0):
            wild = spreads(3, shape, dtype)
            ours, theirs = self.both(d._dropout_forward, d._dropout_forward_reference, wild, bias, gradient, STATE, p)
            assert same_bits(ours[0], theirs[0])
            both = (d._dropout_backward, d._dropout_backward_reference)
            ours, theirs = self.both(*both, gradient, bias, STATE, p, dtype)
            assert same_bits(ours[0], theirs[0])
            torch.testing.assert_close(ours[1], theirs[1], rtol=of_sum, atol=of_sum)

    def softmax(self, shape: tuple[int, ...], dtype: torch.dtype, causal: bool, ones: int | None) -> None:
        """`ones`: which dimensions of the mask are 1 (see mask_of), None: no mask."""
        x, gradient = scores(0, shape, dtype), scores(1, shape, dtype)
        mask = None if ones is None else mask_of(2, shape, torch.float32, ones)
        error = SOFTMAX_ERROR[dtype]
        for p in (0.0, 0.2):
            found = self.both(s._softmax_forward, s._softmax_forward_reference, x, mask, STATE, causal, p)
            torch.testing.assert_close(*found, rtol=error * 4, atol=error, equal_nan=True)
            probabilities = found[0][1 if p else 0]
            found = self.both(s._softmax_backward, s._softmax_backward_reference, gradient, probabilities, STATE, p)
            torch.testing.assert_close(*found, rtol=error * 4, atol=error * 10, equal_nan=True)

    def quantization(self, numel: int, block: int, bits: int, dtype: torch.dtype) -> None:
        x = spreads(0, (numel,), dtype)
        for scale in FLOATS:
            ours, theirs = self.both(q._quantize, q._quantize_reference, x, bits, block, scale)
            assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
            ours, theirs = self.both(q._dequantize, q._dequantize_reference, *ours, numel, block, dtype)
            assert same_bits(ours[0], theirs[0])
        codes, scales = q._quantize_reference(x, bits, block, torch.float32)
        ours = q._reduce(*([there(tensor, self.device)] * 3 for tensor in (codes, scales)), numel, block)
        assert same_bits(ours.cpu(), q._reduce_reference([codes] * 3, [scales] * 3, numel, block))


def spreads(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread(generator, torch.Size(shape).numel(), dtype, wild=True).view(shape)


def check_long_rows(device: str) -> None:
    """Of every dtype, centered and not, masked and not."""
    compared = Compared(device)
    for dtype in FLOATS:
        compared.norms(LONG, dtype, dtype != torch.float16, "weight bias")
        compared.bias_ops(LONG, dtype, dtype)
        for causal in (False, True):
            compared.softmax((3, *LONG), dtype, causal, None if causal else 1)
        compared.quantization(2 * LONG[1], LONG[1] - 1, 4, dtype)
