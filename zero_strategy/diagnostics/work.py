"""How much a step computes: tokens, samples and operations, and what the device could do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_strategy.runtime.torch_private import (
    TorchDispatchMode,
    in_backward,
    is_compiled_in_place,
    packet_of,
    schema_of,
)
from zero_strategy.sharding.gatherer import tensors_in

MOST_SHAPES = 8
"""Shapes of batches that are counted; others are taken in proportion to their tokens or samples."""
_PEAK = {
    "B200": (2250e12, 1125e12),
    "H200": (989e12, 495e12),
    "H100 PCIe": (756e12, 378e12),
    "H100": (989e12, 495e12),
    "A100": (312e12, 156e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 62e12),
    "L40S": (362e12, 183e12),
    "L4": (121e12, 60e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}
"""Operations per second of dense matrix products by what is in a device's name: in 16 bits, in TF32 or fp32."""
_MEASURED_WIDTH = 1024


def amount(inputs: Any) -> tuple[int | None, int | None]:
    """Tokens and samples of a micro-batch, as far as its tensors tell.

    Tokens are the elements of the first integer tensor with two dimensions (batch, length); samples the first
    dimension of the first tensor that has one.
    """
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim()]
    ids = (t for t in tensors if t.dim() == 2 and not t.is_floating_point() and not t.is_complex())
    tokens = next((t.numel() for t in ids if t.dtype != torch.bool), None)
    return tokens, (len(tensors[0]) if tensors else None)


def peak_operations(device: torch.device, dtype: torch.dtype, *, measure: bool = False) -> float | None:
    """Operations per second that a device can do in a dtype; None if that is not known.

    Args:
        device: The device.
        dtype: What matrix products are computed in.
        measure: Where no table knows it, time matrix products for a few tenths of a second.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = next((rates for model, rates in _PEAK.items() if re.search(rf"\b{model}\b", name)), None)
        if found is not None:
            return found[0] if dtype in (torch.bfloat16, torch.float16) else found[1]
    return _measured_peak(device, dtype) if measure else None


def _measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of several products."""
    width = _MEASURED_WIDTH * (8 if device.type == "cuda" else 1)
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * width**3 / best


class FlopMeter:
    """Counts the operations of forwards and of the backwards that belong to them, once for each shape of inputs.

    Those of a backward are not watched but derived: each operand that wants a gradient takes as many as the product
    itself. So what is computed again for lack of memory does not count, as MFU is defined.

    Args:
        module: What is run; a compiled one is not counted, since it would have to be run without its compiler.
    """

    def __init__(self, module: nn.Module) -> None:
        self._counted: dict[Any, int] = {}
        self._amounts: dict[Any, int] = {}
        self._compiled = any(is_compiled_in_place(part) for part in module.modules())

    @contextmanager
    def count(self, inputs: Any) -> Iterator[None]:
        """Around a forward: counted if these shapes are new."""
        key = _key(inputs)
        if inputs is None or self._compiled or key in self._counted or len(self._counted) >= MOST_SHAPES:
            yield
            return
        with Operations() as operations:
            yield
        self._counted[key], self._amounts[key] = operations.total, _size(inputs)

    def operations(self, inputs: Any) -> int | None:
        """Of the forward and backward of these inputs; None if nothing was counted."""
        key = _key(inputs)
        if key in self._counted or not self._counted:
            return self._counted.get(key)
        size = _size(inputs)
        nearest = min(self._amounts, key=lambda known: abs(self._amounts[known] - size))
        return round(self._counted[nearest] * size / self._amounts[nearest])


def _key(inputs: Any) -> Any:
    """What decides how much is computed: shapes; of a pipeline its micro-batches, taken to be alike in every step."""
    return inputs if isinstance(inputs, int) else tuple((t.shape, t.dtype) for t in tensors_in(inputs))


def _size(inputs: Any) -> int:
    if isinstance(inputs, int):
        return max(inputs, 1)
    tokens, samples = amount(inputs)
    return max(tokens or samples or 1, 1)


class Operations(TorchDispatchMode):
    """Adds up the operations of products and attention, by torch's formulas.

    Attributes:
        forward: Of forwards.
        total: With those of the backwards that belong to them.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = self.forward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if in_backward():  # a backward, or what is computed again in one
            return result
        formula: Any = flop_registry.get(packet_of(func))
        if formula is not None:
            operations = int(formula(*args, **kwargs, out_val=result))
        elif str(schema_of(func)).startswith("aten::_scaled_dot_product"):
            operations = int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
        else:
            return result
        self.forward += operations
        self.total += round(operations * (1 + _backward_share(str(func), args)))
        return result


def _backward_share(name: str, args: Any) -> float:
    """Operations of the backward of one op, as a multiple of its own."""
    if not torch.is_grad_enabled():
        return 0.0
    wanted = [tensor.requires_grad for tensor in args if isinstance(tensor, Tensor)]
    if "_scaled_dot_product" in name:  # two products forward, four backward
        return 2.0 * any(wanted)
    operands = wanted[1:] if "addmm" in name or "baddbmm" in name else wanted[:2]  # a bias takes none
    return float(sum(operands))
