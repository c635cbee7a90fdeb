"""Models with quantised weights and low-rank adapters, for plans: a module or a shape of one, before either is made.

    plan = load_config(stage=3).plan(finetuned(model, quantize="nf4", lora=16), world_size=8)

Layers are chosen as transformers and PEFT choose them, and have the names that these give them. transformers quantises
`nn.Linear` and its own `Conv1D`, but no output embedding, no layer that shares its weight, none that a model keeps in
float32. PEFT's "all-linear" takes the same classes, subclasses too, but no output embedding; all else is frozen.
Neither PEFT nor bitsandbytes is needed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.layout import aliases
from zero_strategy.planning.model_shape import ModelShape, NamedShapes, ParameterShape, UnitShape, shape_of
from zero_strategy.quantized.foreseen import Quantisation, quantisation
from zero_strategy.runtime.torch_private import parameters_of

_PREFIX = "base_model.model."
"""PEFT's, before the names of the model that it adapts."""


def finetuned(model: nn.Module, *, quantize: str | None = None, lora: int | None = None) -> nn.Module:
    """A module for a plan: quantised, with adapters, on the meta device; the model itself is not changed.

    Args:
        model: On any device; best built under `torch.device("meta")`. Layers of bitsandbytes may be in it.
        quantize: "nf4", "fp4" (scales quantised, too), "nf4-single", "fp4-single", "int8"; None: weights stay.
        lora: Rank of an adapter on every linear layer, in float32; None: there is none, and all that is not quantised
            is trained as before.

    Raises:
        ValueError: If the quantisation is not known, the rank is not positive, or no layer is there for them.
    """
    way = None if quantize is None else quantisation(quantize)
    _check_rank(lora)
    made = _on_meta(model)
    whole = _models_of_transformers(made)
    for name, part in whole or [("", made)]:
        kept = _kept(part) if whole else _heads(part)
        changed = _quantised(part, way, kept) if way is not None else part
        if lora is not None:
            changed = _adapted(changed, lora, kept.outputs)
        made = _put(made, name, changed)
    return made


def finetuned_shape(
    shape: ModelShape, linears: Collection[str], *, quantize: str | None = None, lora: int | None = None
) -> ModelShape:
    """The shape that `finetuned` leads to, of a model of which only the shape is known.

    Args:
        shape: Of the model.
        linears: Names of its linear layers, but the output embedding.
        quantize, lora: See `finetuned`.

    Raises:
        ValueError: If the quantisation is not known, or the rank is not positive.
    """
    way = None if quantize is None else quantisation(quantize)
    _check_rank(lora)
    if way is None and lora is None:
        return shape
    prefix = _PREFIX if lora is not None else ""
    units = tuple(
        UnitShape(unit.name and prefix + unit.name, _changed(unit.parameters, linears, way, lora))
        for unit in shape.units
    )
    costs = shape.costs
    if costs is not None and lora is not None:
        inner = lora * len(linears) // costs.layers
        costs = costs._replace(per_layer=costs.per_layer + inner, products=costs.products + inner)
    return replace(
        shape,
        units=units,
        buffers={prefix + name: buffer for name, buffer in shape.buffers.items()},
        title=told(shape.title, quantize, lora),
        costs=costs,
        divided=shape.divided if lora is None else _divided(shape.divided, linears),
    )


def told(title: str, quantize: str | None, lora: int | None) -> str:
    """A model's title with what is done to it."""
    parts = [title, *([quantize] if quantize else []), *([f"LoRA of rank {lora}"] if lora is not None else [])]
    return ", ".join(parts)


def _check_rank(lora: int | None) -> None:
    if lora is not None and lora < 1:
        raise ValueError(f"the rank of LoRA is {lora}; accepted: 1 or more")


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter):
            empty = torch.empty_like(tensor.detach(), device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class _Kept:
    """Layers that are left alone.

    Args:
        outputs: Names of output embeddings, which have no adapter, either.
        patterns: Of names of layers that are not quantised, as transformers compares them.
    """

    def __init__(self, outputs: Collection[str], patterns: Collection[str] = ()) -> None:
        self.outputs = frozenset(outputs)
        self._patterns = [(re.compile(rf"(?:{each})(?:(?<=\.)|(?=\.|$))"), each) for each in patterns]

    def names(self, name: str) -> bool:
        """True for a layer that is not quantised."""
        return name in self.outputs or any(p.match(name) or name.endswith(text) for p, text in self._patterns)


def _models_of_transformers(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost ones, with their names."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return list(visit("", root))


def _kept(model: Any) -> _Kept:
    """Layers that transformers' quantizers leave alone."""
    head = model.get_output_embeddings()
    outputs = [name for name, module in model.named_modules() if head is not None and module is head]
    tied = aliases(model)
    last = [name for name, _ in model.named_parameters()][-1:]
    patterns = {name.removesuffix(".weight") for name in (*tied, *tied.values(), *last)}
    return _Kept(outputs, {*outputs, *patterns, *(getattr(model, "_keep_in_fp32_modules", None) or ())})


def _heads(model: nn.Module) -> _Kept:
    """Output embeddings of any module: layers that share a weight, and a last linear layer of an embedding's shape."""
    tied = aliases(model)
    shared = {name.removesuffix(".weight") for name in (*tied, *tied.values())}
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    rows = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Embedding)}
    outputs = {name for name, _ in linears if name in shared}
    outputs |= {name for name, module in linears[-1:] if (module.out_features, module.in_features) in rows}
    return _Kept(outputs)


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if _is_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return int(outputs), int(inputs)
    return int(layer.out_features), int(layer.in_features)


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


class _Quantised(nn.Linear):
    """Parameters of a quantised layer, in the order in which it has them; a linear layer, as those of bitsandbytes."""

    def __init__(self, layer: Any, way: Quantisation) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = _sizes(layer)
        made = way.parameters(self.out_features, self.in_features)
        self.weight = made.pop("weight")
        self.bias = layer.bias
        parameters_of(self).update(made)
        self.requires_grad_(False)

    def forward(self, *inputs: Any) -> Any:
        """Refuse: a plan computes nothing. As layers of bitsandbytes have, it is a forward of its own."""
        raise NotImplementedError


class _Adapted(nn.Module):
    """A layer with an adapter, with the names of PEFT's."""

    def __init__(self, base_layer: nn.Module, rank: int) -> None:
        super().__init__()
        outputs, inputs = _sizes(base_layer)
        options: dict[str, Any] = {"bias": False, "dtype": torch.float32, "device": "meta"}
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, **options)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, **options)})
        self.lora_magnitude_vector = nn.ModuleDict()
        self.lora_variant: dict[str, Any] = {}


class _Model(nn.Module):
    """The place of PEFT's `LoraModel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _Finetuned(nn.Module):
    """The place of a `PeftModel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = _Model(model)


def _quantised(model: nn.Module, way: Quantisation, kept: _Kept) -> nn.Module:
    def layer_for(name: str, module: nn.Module) -> nn.Module | None:
        taken = (type(module) is nn.Linear or _is_conv1d(module)) and not kept.names(name)
        return _Quantised(module, way) if taken else None

    return _replaced(model, layer_for, f"quantize is {way.name!r}, but")


def _adapted(model: nn.Module, rank: int, outputs: Collection[str]) -> nn.Module:
    if any(name.rpartition(".")[2] == "lora_A" for name, _ in model.named_modules()):
        raise ValueError(f"lora is {rank}, but {type(model).__name__} has adapters already: plan it as it is")
    model.requires_grad_(False)

    def layer_for(name: str, module: nn.Module) -> nn.Module | None:
        taken = isinstance(module, nn.Linear) or _is_conv1d(module)
        return _Adapted(module, rank) if taken and name not in outputs else None

    return _Finetuned(_replaced(model, layer_for, f"lora is {rank}, but"))


def _replaced(model: nn.Module, layer_for: Callable[[str, nn.Module], nn.Module | None], why: str) -> nn.Module:
    made: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        layer = made.get(id(module)) or layer_for(name, module)
        if layer is not None:
            made[id(module)] = layer
            model = _put(model, name, layer)
    if not made:
        raise ValueError(f"{why} {type(model).__name__} has no linear layer beside its output embedding: leave it out")
    return model


def _put(root: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The root with another module under a name; for the root's own, that module."""
    if name:
        before, _, last = name.rpartition(".")
        setattr(root.get_submodule(before), last, module)
    return root if name else module


def _divided(before: Mapping[str, int], linears: Collection[str]) -> dict[str, int]:
    """Dimensions that ranks divide: with a layer its adapter's outputs (B), or inputs (A)."""
    found: dict[str, int] = {}
    for name, dim in before.items():
        layer, _, key = name.rpartition(".")
        if layer not in linears:
            found[_PREFIX + name] = dim
            continue
        found[f"{_PREFIX}{layer}.base_layer.{key}"] = dim
        if key == "weight":
            found[f"{_PREFIX}{layer}.{'lora_A' if dim else 'lora_B'}.default.weight"] = dim
    return found


def _changed(named: NamedShapes, linears: Collection[str], way: Quantisation | None, lora: int | None) -> NamedShapes:
    """Parameters of a unit, each layer's in the order in which it has them."""
    found: dict[str, list[tuple[str, ParameterShape]]] = {}
    weights: dict[str, ParameterShape] = {}
    for name, shape in named:
        layer, _, key = name.rpartition(".")
        own = found.setdefault(layer, [])
        if layer not in linears:
            own.append((key, replace(shape, requires_grad=shape.requires_grad and lora is None)))
            continue
        weights |= {layer: shape} if key == "weight" else {}
        made = way.parameters(*shape.shape)["weight"] if way is not None and key == "weight" else None
        frozen = way is not None or lora is not None
        cast_as = shape.cast_as if way is None else ""  # quantised layers have a forward of their own
        kept = replace(shape, requires_grad=not frozen, cast_as=cast_as)
        own.append((key, shape_of(made) if made is not None else kept))
    for layer, shape in weights.items():
        own = found[layer]
        if way is not None:
            scales = {key: each for key, each in way.parameters(*shape.shape).items() if key != "weight"}
            own += [(key, shape_of(each)) for key, each in scales.items()]
        if lora is not None:
            outputs, inputs = shape.shape
            found[layer] = [(f"base_layer.{key}", each) for key, each in own]
            found[layer] += [
                ("lora_A.default.weight", ParameterShape((lora, inputs), cast_as="autocast")),
                ("lora_B.default.weight", ParameterShape((outputs, lora), cast_as="autocast")),
            ]
    prefix = _PREFIX if lora is not None else ""
    return tuple(
        (f"{prefix}{layer}.{key}" if layer else f"{prefix}{key}", shape)
        for layer, own in found.items()
        for key, shape in own
    )
