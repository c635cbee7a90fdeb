"""Parameters of quantised layers before there are any: shapes and dtypes for plans, by the rules of bitsandbytes.

A plan sees a module as an engine does: with scales as parameters (`quantized/scales.py`), and with weights packed. Here
a module is shown so without being changed, and layers get stand-ins on the meta device. The library is not needed.

    weight                 4 bits: (ceil(n / 2), 1) of the storage dtype's bytes;  8 bits: (outputs, inputs) int8
    weight.absmax          a scale for every block of 64 elements: float32, or uint8 where scales are quantised, too
    weight.nested_absmax   then: a float32 scale for every 256 of those
    SCB                    8 bits: a float32 scale for every row
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.scale import Scale, scale
from zero_strategy.quantized.scales import is_quantised, library_class, slots_of
from zero_strategy.quantized.wrapped import parts_of
from zero_strategy.runtime.torch_private import of_class, parameters_of

_BLOCK, NESTED_BLOCK = 64, 256


class ForeseenWeight(Scale):
    """A stand-in of packed or rounded values, which no cast changes.

    Attributes:
        unpacked: Elements of the weight that it stands for.
    """

    unpacked: int


@dataclass(frozen=True)
class Quantisation:
    """A way in which weights are quantised.

    Attributes:
        name: Of the command's option.
        bits: Of an element.
        nested: Scales are quantised, too.
    """

    name: str
    bits: int
    nested: bool = False

    def parameters(self, outputs: int, inputs: int) -> dict[str, nn.Parameter]:
        """The weight of a layer and its scales, on the meta device, by their names in the layer."""
        if self.bits == 8:
            return _in_rows(outputs, inputs)
        return _in_blocks(outputs * inputs, _BLOCK, self.nested, torch.uint8)


QUANTISATIONS = {
    each.name: each
    for each in (
        Quantisation("nf4", 4, nested=True),
        Quantisation("nf4-single", 4),
        Quantisation("fp4", 4, nested=True),
        Quantisation("fp4-single", 4),
        Quantisation("int8", 8),
    )
}
"""By name; "single": scales stay in float32 (`bnb_4bit_use_double_quant=False`)."""


def quantisation(name: str) -> Quantisation:
    """The way of a name.

    Raises:
        ValueError: If there is none; names those that there are.
    """
    if name not in QUANTISATIONS:
        raise ValueError(f"quantisation {name!r} is not known to the planner; accepted: {', '.join(QUANTISATIONS)}")
    return QUANTISATIONS[name]


def unpacked_numel(parameter: nn.Parameter) -> int:
    """Elements of the weight that packed or rounded values stand for; 0 for other parameters."""
    if isinstance(parameter, ForeseenWeight):
        return parameter.unpacked
    if not is_quantised(parameter):
        return 0
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


@contextmanager
def with_scales(root: nn.Module) -> Iterator[None]:
    """Within it the modules below `root` have the parameters that an engine gives them; then they have theirs again.

    Layers of the library whose weights are not quantised yet have stand-ins for both.

    Raises:
        ValueError: If a layer's weight cannot be sharded; names it.
    """
    before: list[tuple[Any, dict[str, Any]]] = []
    known: dict[int, Scale] = {}
    parts_made: dict[int, nn.Parameter] = {}
    try:
        for name, module in root.named_modules():
            own: Any = parameters_of(module)
            if is_quantised(own.get("weight")):
                made = _foreseen(name, module, known)
                before.append((own, dict(own)))
                own.update(made)
            elif parts := parts_of(name, module, parts_made):
                before.append((own, dict(own)))
                own.pop("weight", None)
                own.update(parts)
        yield
    finally:
        for own, had in before:
            own.clear()
            own.update(had)


def _foreseen(name: str, module: nn.Module, known: dict[int, Scale]) -> dict[str, nn.Parameter]:
    weight: Any = module.weight
    if not _is_unquantised(module, weight):
        slots = [(slot.key, slot.value) for slot in slots_of(name, module)]
        # Two layers of one weight have one scale.
        return {key: known.setdefault(id(value), _as_scale(value)) for key, value in slots}
    if library_class(weight, "Int8Params"):
        return _in_rows(*weight.shape)
    return _in_blocks(weight.numel(), weight.blocksize, weight.compress_statistics, weight.quant_storage)


def _as_scale(value: Tensor) -> Scale:
    return value if isinstance(value, Scale) else scale(value)


def _is_unquantised(module: Any, weight: Any) -> bool:
    """True for a weight that the library quantises when the module moves, and that is not trained."""
    if weight.requires_grad:
        return False
    if library_class(weight, "Params4bit"):
        return getattr(weight, "quant_state", None) is None and getattr(module, "quant_state", None) is None
    holder = module.state if library_class(module, "Linear8bitLt") else weight
    settled = [getattr(holder, "has_fp16_weights", False), weight.dtype == torch.int8 and not weight.is_meta]
    return not any(settled) and getattr(holder, "SCB", None) is None and getattr(weight, "SCB", None) is None


def _in_blocks(numel: int, blocksize: int, nested: bool, storage: torch.dtype) -> dict[str, nn.Parameter]:
    blocks = -(-numel // blocksize)
    made: dict[str, nn.Parameter] = {
        "weight": _weight((-(-numel // 2) // storage.itemsize, 1), storage, numel),
        "weight.absmax": scale(_meta((blocks,), torch.uint8 if nested else torch.float32)),
    }
    if nested:
        made["weight.nested_absmax"] = scale(_meta((-(-blocks // NESTED_BLOCK),), torch.float32))
    return made


def _in_rows(outputs: int, inputs: int) -> dict[str, nn.Parameter]:
    weight = _weight((outputs, inputs), torch.int8, outputs * inputs)
    return {"weight": weight, "SCB": scale(_meta((outputs,), torch.float32))}


def _weight(shape: tuple[int, int], dtype: torch.dtype, unpacked: int) -> ForeseenWeight:
    made = of_class(ForeseenWeight, _meta(shape, dtype))
    made.unpacked = unpacked
    return made


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
