"""Models with weights to be quantised, for `from_pretrained`: each weight by itself, when its slices are read.

transformers decides which, and replaces layers for bitsandbytes; torchao's weights are in plain layers. Here a layer's
weight gets the shape and dtype of packed values, and its scales become parameters (`quantized/scales.py`), all without
memory. Their values come from the file, where it is quantised already; else from a conversion that reads one weight,
quantises it by the library itself, and is dropped.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.entries import DESCRIPTION, TABLES
from zero_strategy.quantized.foreseen import NESTED_BLOCK
from zero_strategy.quantized.scales import OFFSET, attach_scales
from zero_strategy.quantized.values import is_transposed
from zero_strategy.quantized.wrapped import inner_tensors
from zero_strategy.runtime.torch_private import swap_values

_METHODS = {"Bnb4BitHfQuantizer": "load_in_4bit", "Bnb8BitHfQuantizer": "load_in_8bit"}
"""Quantizers of transformers, and the setting of `BitsAndBytesConfig` that asks for each."""
_TORCHAO = "TorchAoHfQuantizer"
_PARTS = 16
"""Of a weight, which are quantised one after another where its rows know nothing of each other."""
SLICED = ("weight.absmax", "weight.nested_absmax", "SCB")
"""Scales that are divided as their weights are."""
_STORED = (*SLICED, *TABLES, f"{DESCRIPTION}nf4", f"{DESCRIPTION}fp4", "weight_format")
"""Names in files of what belongs to a quantised weight, behind the layer's."""


@dataclass(frozen=True)
class Recipe:
    """Quantisation of one weight. It refers to no layer: by the time it runs, an adapter may have taken its place.

    Attributes:
        target: The weight.
        dtype: Of the values that are quantised.
        transposed: They are the transpose of what the file has.
        settings: Of `Params4bit`; None: int8.
    """

    target: str
    dtype: torch.dtype
    transposed: bool
    settings: Mapping[str, Any] | None

    def quantise(self, value: Tensor) -> dict[str, Tensor]:
        """Values of the weight and of its scales by name; with the offset of 4-bit scales that are quantised, too.

        Args:
            value: The weight as its file has it.
        """
        library: Any = importlib.import_module("bitsandbytes")
        value = value.T if self.transposed else value
        if self.settings is None:
            return _by_rows(value, lambda rows: self._quantise_rows(rows.to(self.dtype)))
        made = library.nn.Params4bit(value.to(self.dtype), requires_grad=False, **self.settings).to("cpu")
        state: Any = made.quant_state
        found = {self.target: made.data, f"{self.target}.absmax": state.absmax}
        if state.nested:
            found[f"{self.target}.nested_absmax"] = state.state2.absmax
            found[f"{self.target}.{OFFSET}"] = state.offset
        return found

    def _quantise_rows(self, rows: Tensor) -> dict[str, Tensor]:
        library: Any = importlib.import_module("bitsandbytes")
        made = library.nn.Int8Params(rows, requires_grad=False, has_fp16_weights=False).to("cpu")
        return {self.target: made.data, f"{self.target.removesuffix('weight')}SCB": made.SCB}


@dataclass(frozen=True)
class WrappedRecipe:
    """Quantisation of one weight by torchao.

    Attributes:
        target: The weight.
        dtype: Of the values that are quantised.
        config: torchao's.
    """

    target: str
    dtype: torch.dtype
    config: Any

    def quantise(self, value: Tensor) -> dict[str, Tensor]:
        """Values of what is inside of the weight, by name; see `Recipe.quantise`."""
        name, granularity = type(self.config).__name__, getattr(self.config, "granularity", None)
        if name == "Int8WeightOnlyConfig" and type(granularity).__name__ in ("PerRow", "PerGroup"):
            return _by_rows(value, self._quantise)
        return self._quantise(value)

    def _quantise(self, value: Tensor) -> dict[str, Tensor]:
        library: Any = importlib.import_module("torchao.quantization")
        outputs, inputs = value.shape
        holder: Any = nn.Linear(inputs, outputs, device="meta")
        holder.weight = nn.Parameter(value.to(self.dtype), requires_grad=False)
        library.quantize_(holder, self.config, filter_fn=lambda *_: True)
        found = {f"{self.target}.{name}": part for name, part in inner_tensors(holder.weight).items()}
        holder.weight = None  # torchao makes a cycle of the layer (`extra_repr`), which would keep the values
        return found


def _by_rows(value: Tensor, quantise: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Quantise a few rows of a weight at a time, where each has scales of its own.

    The libraries' own steps take 10 bytes (bitsandbytes) to 30 (torchao) for each element that they are given.
    """
    found: dict[str, Tensor] = {}
    count = max(1, -(-len(value) // _PARTS))
    for start in range(0, len(value), count):
        for name, part in quantise(value[start : start + count]).items():
            whole = found.setdefault(name, part.new_empty((len(value), *part.shape[1:])))
            whole[start : start + len(part)] = part
    return found


class WeightQuantiser:
    """Quantised layers of a model that has no values yet.

    Args:
        model: transformers has put its quantised layers in.
        hf_quantizer: It.

    Raises:
        ValueError: If weights are quantised by something else than bitsandbytes or torchao; names it.
    """

    def __init__(self, model: nn.Module, hf_quantizer: Any) -> None:
        kind = type(hf_quantizer).__name__
        self.config: Any = None
        if kind == _TORCHAO:
            self.config = _torchao_config(hf_quantizer)
        elif kind not in _METHODS:
            method = getattr(hf_quantizer.quantization_config, "quant_method", kind)
            raise ValueError(
                f"weights quantised by {getattr(method, 'value', method)} cannot be read in slices; accepted: "
                "BitsAndBytesConfig(load_in_4bit=True), (load_in_8bit=True) and TorchAoConfig. Or load with "
                "transformers' own from_pretrained, whole on every rank"
            )
        self.model, self.hf_quantizer = model, hf_quantizer
        self.in_file: bool = hf_quantizer.pre_quantized

    def wants(self, target: str) -> bool:
        """True for the weight of a quantised layer."""
        return target.endswith("weight") and bool(self.hf_quantizer.param_needs_quantization(self.model, target))

    def companion(self, key: str) -> tuple[str, str] | None:
        """The weight that a name in a quantised file belongs to, and the name behind the layer's."""
        for suffix in _STORED if self.in_file else ():
            if key.endswith(f".{suffix}"):
                return f"{key.removesuffix(suffix)}weight", suffix
        return None

    def expect(self, target: str, shape: torch.Size, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Give a layer parameters without memory, for values that its recipe makes.

        Args:
            target: The weight.
            shape, dtype: Of the values before.

        Returns:
            By name.
        """
        layer = self._layer(target)
        if self.config is not None:
            return self._expect_wrapped(target, layer, torch.empty(shape, dtype=dtype, device="meta"))
        library: Any = importlib.import_module("bitsandbytes.functional")
        weight: Any = layer.weight
        if "SCB" in vars(weight):
            return self._expect_rows(target, layer, shape)
        code = library.get_4bit_type(weight.quant_type, device="cpu")
        shape = shape[::-1] if is_transposed(layer) else shape
        blocks = -(-math.prod(shape) // weight.blocksize)
        state = library.QuantState(
            _meta(blocks, torch.float32), shape, code, weight.blocksize, weight.quant_type, dtype
        )
        if weight.compress_statistics:
            state.absmax, state.nested = _meta(blocks, torch.uint8), True
            state.offset = torch.tensor(math.nan)  # until one rank has it: `close_deferred`
            state.state2 = library.QuantState(
                _meta(-(-blocks // NESTED_BLOCK), torch.float32),
                code=library.create_dynamic_map(),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
        packed = -(-math.prod(shape) // 2) // weight.quant_storage.itemsize
        return self._settle(target, layer, state, torch.empty(packed, 1, dtype=weight.quant_storage, device="meta"))

    def expect_stored(
        self, target: str, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], small: dict[str, Tensor]
    ) -> dict[str, nn.Parameter]:
        """Give a layer parameters without memory, for values that a file has.

        Args:
            target: The weight.
            shapes: Shapes and dtypes of "weight" and of its scales, by their names behind the layer's.
            small: What else the file has for it.

        Returns:
            By name, behind the layer's.

        Raises:
            ValueError: If something is missing.
        """
        library: Any = importlib.import_module("bitsandbytes.functional")
        layer = self._layer(target)
        weight: Any = layer.weight
        empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
        if "SCB" in vars(weight):
            if "SCB" not in shapes:
                raise ValueError(f"{target} is stored in int8 without its scales (SCB)")
            return self._expect_rows(target, layer, torch.Size(shapes["weight"][0]))
        described = [value for name, value in small.items() if name.startswith(DESCRIPTION)]
        if "weight.absmax" not in shapes or len(described) != 1:
            raise ValueError(f"{target} is stored in 4 bits without its scales: the file has {sorted(small | empty)}")
        parts = {name.removeprefix("weight."): value for name, value in {**empty, **small}.items() if name != "weight"}
        state = library.QuantState.from_dict(parts, device=None)
        weight.blocksize, weight.compress_statistics, weight.quant_type = (
            state.blocksize,
            state.nested,
            state.quant_type,
        )
        return self._settle(target, layer, state, empty["weight"])

    def recipe(self, target: str, dtype: torch.dtype) -> Recipe | WrappedRecipe:
        """Steps from a weight's values in its file to those of the parameters that `expect` made.

        Args:
            target: The weight.
            dtype: Of the values that are quantised.
        """
        layer = self._layer(target)
        if self.config is not None:
            return WrappedRecipe(target, dtype, self.config)
        weight: Any = layer.weight
        if "SCB" in vars(weight):
            return Recipe(target, dtype, is_transposed(layer), None)
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        return Recipe(target, dtype, is_transposed(layer), {name: getattr(weight, name) for name in names})

    def _layer(self, target: str) -> Any:
        return self.model.get_submodule(target.rpartition(".")[0])

    def _expect_rows(self, target: str, layer: Any, shape: torch.Size) -> dict[str, nn.Parameter]:
        shape = shape[::-1] if is_transposed(layer) and not self.in_file else shape
        layer.state.SCB = _meta(shape[0], torch.float32)
        return self._settle(target, layer, None, torch.empty(shape, dtype=torch.int8, device="meta"))

    def _expect_wrapped(self, target: str, layer: Any, empty: Tensor) -> dict[str, nn.Parameter]:
        library: Any = importlib.import_module("torchao.quantization")
        layer.weight = nn.Parameter(empty, requires_grad=False)
        library.quantize_(layer, self.config, filter_fn=lambda *_: True)
        return self._attached(target, layer)

    def _settle(self, target: str, layer: Any, state: Any, empty: Tensor) -> dict[str, nn.Parameter]:
        swap_values(layer.weight, empty)
        if state is not None:
            layer.weight.bnb_quantized, layer.weight.quant_state = True, state
            layer.quant_state = state
        return self._attached(target, layer)

    def _attached(self, target: str, layer: Any) -> dict[str, nn.Parameter]:
        attach_scales(layer, target.removesuffix(".weight"))
        found = {f"{target.removesuffix('weight')}{name}": p for name, p in layer.named_parameters() if name != "bias"}
        # transformers initialises what is not marked so.
        layer._is_hf_initialized = all(name != "bias" for name, _ in layer.named_parameters())
        for parameter in found.values():
            parameter._is_hf_initialized = True
        return found


def _torchao_config(hf_quantizer: Any) -> Any:
    """The config by which torchao quantises every weight.

    Raises:
        ValueError: If weights are in the file as torchao stores them, or are quantised in different ways.
    """
    config = hf_quantizer.quantization_config.get_apply_tensor_subclass()
    if hf_quantizer.pre_quantized:
        raise ValueError(
            "weights that torchao quantised before they were saved cannot be read in slices: load the model that they "
            "are of with this quantization_config, or load with transformers' own from_pretrained, whole on every rank"
        )
    if type(config).__name__ == "FqnToConfig" or hf_quantizer.quantization_config.include_input_output_embeddings:
        raise ValueError(
            f"TorchAoConfig({type(config).__name__}): all linear weights are quantised in one way, embeddings are not; "
            "accepted is one config of torchao such as Int8WeightOnlyConfig(), without "
            "include_input_output_embeddings. Or load with transformers' own from_pretrained, whole on every rank"
        )
    return config


def _meta(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")
