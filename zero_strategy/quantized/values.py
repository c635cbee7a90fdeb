"""Values of quantised weights, for those who cannot read packed ones, and adapters of PEFT added to them.

What a layer is given back is what its library computes with. An adapter is added in float32, and the sum is not
quantised again.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.scales import is_quantised
from zero_strategy.quantized.wrapped import hollow_weight, inner_tensors, is_holding, weight_values
from zero_strategy.runtime.torch_private import parameters_of


def quantised_layers(root: nn.Module) -> dict[str, nn.Module]:
    """Modules below `root` with a quantised weight, by name."""
    return {
        name: module
        for name, module in root.named_modules()
        if is_quantised(parameters_of(module).get("weight")) or is_holding(module)
    }


def leading_key(layer: nn.Module) -> str:
    """The one of a quantised layer's parameters in whose place its values are given."""
    return f"weight.{next(iter(inner_tensors(layer.weight)))}" if is_holding(layer) else "weight"


def hollow_values(layer: Any) -> Tensor:
    """A tensor on the meta device as `dequantised` gives it."""
    if is_holding(layer):
        return hollow_weight(layer.weight)
    state = getattr(layer.weight, "quant_state", None)
    dtype, shape = (torch.float32, layer.weight.shape) if state is None else (state.dtype, state.shape)
    shape = shape[::-1] if is_transposed(layer) else shape
    return torch.empty(shape, dtype=dtype, device="meta")


@torch.no_grad()
def dequantised(layer: Any, adapters: Sequence[tuple[Any, str]] = ()) -> Tensor:
    """The values of a layer's weight, which is whole just now, in the shape that the model's checkpoints have.

    Args:
        layer: A quantised one.
        adapters: Layers of PEFT around it, each with the name of an adapter that is added.

    Raises:
        ValueError: If an adapter is of a kind that has no matrix to add; names it.
    """
    values = weight_values(layer.weight) if is_holding(layer) else _library_values(layer)
    dtype = values.dtype
    for outer, name in adapters:
        variant = getattr(outer, "lora_variant", {}).get(name)
        if variant is not None:
            values = variant.merge_safe(outer, name, values)
        elif hasattr(outer, "get_delta_weight"):
            values = values.float() + outer.get_delta_weight(name).float()
        else:
            raise ValueError(
                f"adapter {name!r} ({type(outer).__name__}) has no matrix that is added to a quantised weight: merge "
                "it by PEFT after engine.close(gather=True), or pass merge_adapters=False"
            )
    found: Tensor = values.to(dtype)
    return found.T.contiguous() if is_transposed(layer) else found


def _library_values(layer: Any) -> Any:
    """The values that bitsandbytes computes with."""
    library: Any = importlib.import_module("bitsandbytes.functional")
    state = getattr(layer.weight, "quant_state", None)
    if state is not None:
        return library.dequantize_4bit(layer.weight.data, state)
    holder = layer.state if hasattr(layer, "state") else layer.weight
    return library.int8_vectorwise_dequant(layer.weight.data, holder.SCB)


def is_transposed(layer: Any) -> bool:
    """True where a layer stands for transformers' `Conv1D`, whose weight is the transpose."""
    source: Any = getattr(layer, "source_cls", None)
    return source is not None and source.__name__ == "Conv1D"
