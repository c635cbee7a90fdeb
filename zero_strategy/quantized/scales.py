"""Scales of quantised weights as frozen parameters of their modules, so that they are divided as the weights are.

bitsandbytes keeps a quantised weight in a parameter, and its scales in attributes of an object beside it. Here each
scale becomes a parameter of the weight's module under the name that it has in the library's own state dicts
(`weight.absmax`, `weight.nested_absmax`, `SCB`), and the attribute refers to this parameter. The library goes on
reading the attribute, and finds what the engine has gathered there; plan, checkpoints, tiers and guards know a scale
as they know any parameter.

| class | weight | scales | what refers to them |
| --- | --- | --- | --- |
| `Linear4bit` | `Params4bit` | `weight.absmax`, `weight.nested_absmax` | `weight.quant_state` |
| `Linear8bitLt` | `Int8Params` | `SCB` | `module.state`, with `CB`, the weight |

The library is recognised by the names of its classes: nothing of it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.entries import leave_entries, load_entries
from zero_strategy.quantized.rows import follow_no_weight, follow_weight
from zero_strategy.quantized.scale import Scale, scale
from zero_strategy.quantized.wrapped import (
    HoldsParameters,
    attach_parts,
    detach_parts,
    inner_tensors,
    where_parts_are,
    wrapped_weights,
)
from zero_strategy.runtime.torch_private import parameters_of

_LIBRARY = "bitsandbytes."
_FAST_EVALUATION = "support_avx512bf16_for_cpu"
"""Attribute of bitsandbytes' layers: evaluation on such CPUs may replace the weight by one in another order."""


@dataclass(frozen=True)
class Slot:
    """Place of a scale.

    Attributes:
        module: It has the weight.
        key: Name among the module's parameters.
        holder: Object that the library reads it from.
        attribute: Its name there.
    """

    module: nn.Module
    key: str
    holder: Any
    attribute: str

    @property
    def value(self) -> Tensor:
        """The tensor that the library reads now."""
        found: Tensor = getattr(self.holder, self.attribute)
        return found


def is_quantised(parameter: object) -> bool:
    """True for packed or rounded values of a quantised weight; a scale is none."""
    return library_class(parameter, "Params4bit") or library_class(parameter, "Int8Params")


def keeps_dtype(parameter: object) -> bool:
    """True for a parameter whose elements mean nothing in another dtype: a quantised weight, or a scale of one."""
    return isinstance(parameter, Scale) or is_quantised(parameter)


class CastByLibrary(nn.Parameter):
    """A bias of a 4-bit layer, which casts it in its forward and writes the cast back first.

    The write is left out (`fsdp/tracked.py`): a bucket has one dtype, and the layer casts what it uses all the same.
    """


def is_asked_by_library(frame: FrameType) -> bool:
    """True if a layer of the library asks, and not the user's code."""
    return str(frame.f_globals.get("__name__", "")).startswith(_LIBRARY)


class QuantisedLayers:
    """Layers whose scales are parameters, as they were when a model took them.

    Args:
        root: A module of which `attach_scales` has done all.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known: list[tuple[str, Any, Any, Any]] = [
            (name, slot.module, slot.module.weight, slot.holder)
            for name, module in root.named_modules()
            for slot in slots_of(name, module)
        ]
        self._known += [
            (name, module, weight, weight)
            for name, module in root.named_modules()
            for _, weight in wrapped_weights(module)
        ]

    def check(self) -> None:
        """Raise if a layer has another weight since.

        Raises:
            RuntimeError: Naming the layer and the way out.
        """
        for name, module, weight, _ in self._known:
            if getattr(module, "weight", None) is not weight or _has_other_parts(module, weight):
                raise RuntimeError(
                    f"{name} has another quantised weight than the engine divides, as PEFT's merge and unmerge give it "
                    "one: no save and no other rank would have its values. Iterate engine.weights(), which merges "
                    "without writing, or merge after engine.close(gather=True) on all ranks"
                )

    def move_tables(self) -> None:
        """Bring what is no parameter to where the weights compute: kernels read it by address."""
        for index, (name, module, weight, holder) in enumerate(self._known):
            if isinstance(weight, HoldsParameters):
                made = where_parts_are(module)
                self._known[index] = (name, module, made, made)
                continue
            for table in ("code", "offset"):
                value = getattr(holder, table, None)
                if isinstance(value, Tensor) and value.device != weight.device:
                    setattr(holder, table, value.to(weight.device))
            if (state := getattr(weight, "quant_state", None)) is not None and state.offset is not None:
                state.offset = state.offset.to(weight.device)


def _has_other_parts(module: nn.Module, weight: Any) -> bool:
    if not isinstance(weight, HoldsParameters):
        return False
    own = parameters_of(module)
    return any(own.get(f"weight.{name}") is not part for name, part in inner_tensors(weight).items())


def attach_scales(root: nn.Module, prefix: str = "") -> None:
    """Make parameters of all scales below `root`. Those that are parameters already stay what they are.

    Args:
        root: The module.
        prefix: What its names in messages begin with.

    Raises:
        ValueError: If a layer is not quantised yet, quantises its weight in every forward, cannot be saved, has other
            numbers of values than its weight's shape and block size ask for, or scales that are no finite numbers;
            names it.
    """
    # All of them before anything changes: a refusal leaves the module as it was.
    found = [(module, list(slots_of(name, module))) for name, module in root.named_modules()]
    for (name, module), (_, slots) in zip(root.named_modules(), found, strict=True):
        if slots:
            _check_counts(f"{prefix}{name}", module)
            _check_finite(f"{prefix}{name}", slots)
    tables: dict[tuple[torch.dtype, torch.device, bytes], Tensor] = {}
    for module, slots in found:
        for slot in slots:
            known = parameters_of(module).get(slot.key)
            # In a copied module the library's object has a copy of its own, which no load reaches.
            made = known if isinstance(known, Scale) else slot.value
            made = made if isinstance(made, Scale) else scale(made)
            # Not by `register_parameter`, which takes no dots: the names are those of the library's own files.
            parameters_of(module)[slot.key] = made
            setattr(slot.holder, slot.attribute, made)
        if slots:
            _settle(module, tables)
    attach_parts(root)


def detach_scales(root: nn.Module) -> None:
    """Undo `attach_scales`: the library has plain tensors again, with the values that the parameters have now."""
    # All of them first: layers may share a weight, and its scales.
    found = [(module, list(slots_of(name, module))) for name, module in root.named_modules()]
    for module, slots in found:
        for slot in slots:
            if isinstance(slot.value, Scale):
                setattr(slot.holder, slot.attribute, slot.value.detach().as_subclass(Tensor))
            parameters_of(module).pop(slot.key, None)
        leave_entries(module)
        if slots and library_class(module, "Linear8bitLt"):
            follow_no_weight(module)
        if slots and _FAST_EVALUATION in vars(module):
            setattr(module, _FAST_EVALUATION, True)
        if isinstance(bias := parameters_of(module).get("bias"), CastByLibrary):
            bias.__class__ = nn.Parameter  # type: ignore[assignment]
    detach_parts(root)


OFFSET = "nested_offset"
"""Name of the mean of a weight's scales, which quantised scales are given without; a number, not a parameter."""


def weight_of(name: str) -> str:
    """The weight's name, of a 4-bit weight or of its scales."""
    return name.removesuffix(".absmax").removesuffix(".nested_absmax")


def lacking_offsets(root: nn.Module) -> dict[str, Any]:
    """The states of quantised weights whose offset is not known yet, by the name of the weight."""
    found, seen = dict[str, Any](), set[int]()
    for name, module in root.named_modules():
        state = getattr(parameters_of(module).get("weight"), "quant_state", None)
        if id(state) in seen:  # of a tied weight: its first name is the one that counts
            continue
        seen.add(id(state))
        if state is not None and state.offset is not None and bool(state.offset.isnan()):
            found[f"{name}.weight" if name else "weight"] = state
    return found


def slots_of(name: str, module: nn.Module) -> Iterator[Slot]:
    """The scales of a module itself, its weight's."""
    weight = parameters_of(module).get("weight")
    if weight is None or not is_quantised(weight):
        return
    if any(library_class(module, kind) for kind in ("Embedding4bit", "Embedding8bit")):
        raise ValueError(
            f"{name or 'the module'} is a {type(module).__name__}, whose state bitsandbytes cannot save: keep the "
            "embedding as it is, and quantise linear layers"
        )
    if weight.requires_grad and not getattr(weight, "has_fp16_weights", False):
        raise ValueError(
            f"{name}.weight is quantised and requires a gradient: freeze it (requires_grad_(False)) and train an "
            "adapter, or train the weight before it is quantised"
        )
    if library_class(weight, "Params4bit"):
        state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if state is None:
            raise ValueError(_unquantised(name, module))
        weight.quant_state = state  # type: ignore[attr-defined]
        yield Slot(module, "weight.absmax", state, "absmax")
        if state.state2 is not None:
            yield Slot(module, "weight.nested_absmax", state.state2, "absmax")
        return
    holder = module.state if library_class(module, "Linear8bitLt") else weight
    if getattr(holder, "has_fp16_weights", False):
        raise ValueError(
            f"{name or 'the module'} is a {type(module).__name__} with has_fp16_weights=True: it keeps an int8 copy of "
            "its whole weight on every rank, which sharding does not divide. Take nn.Linear, or "
            "has_fp16_weights=False with a frozen weight and an adapter"
        )
    if holder is not weight and getattr(weight, "CB", None) is not None:
        module.init_8bit_state()  # type: ignore[operator]
    if getattr(holder, "SCB", None) is None:
        raise ValueError(_unquantised(name, module))
    yield Slot(module, "SCB", holder, "SCB")


def _check_counts(name: str, module: nn.Module) -> None:
    """Raise unless a weight has all its values and scales: the library's kernels read as many as its shape asks for."""
    weight: Any = module.weight
    if library_class(weight, "Params4bit"):
        state = weight.quant_state
        numel = math.prod(state.shape)
        blocks = -(-numel // state.blocksize)
        wanted = {"weight": -(-numel // 2) // weight.dtype.itemsize, "weight.absmax": blocks}
        given = {"weight": weight.numel(), "weight.absmax": state.absmax.numel()}
        if state.state2 is not None:
            wanted["weight.nested_absmax"] = -(-blocks // state.state2.blocksize)
            given["weight.nested_absmax"] = state.state2.absmax.numel()
        elif state.absmax.dtype == torch.uint8:
            raise ValueError(
                f"{name}.weight.absmax is of uint8, as scales are that are quantised themselves, and there is no "
                "weight.nested_absmax: quantise the weight again, or take the whole file"
            )
    else:
        holder: Any = module.state if library_class(module, "Linear8bitLt") else weight
        wanted, given = {"SCB": weight.shape[0]}, {"SCB": holder.SCB.numel()}
    for part, count in wanted.items():
        if given[part] != count:
            raise ValueError(
                f"{name}.{part} has {given[part]} elements, and the weight's shape and block size ask for {count}: "
                "something of it is missing. Quantise the weight again, or take the whole file"
            )


def _check_finite(name: str, slots: list[Slot]) -> None:
    for slot in slots:
        value = slot.value
        if value.is_meta or not value.is_floating_point() or isinstance(value, Scale):
            continue
        if wrong := int((~value.isfinite()).sum()):
            raise ValueError(
                f"{name}.{slot.key} has {wrong} of {value.numel()} elements that are not finite, as after a damaged "
                "read or of a weight that had such values: quantise the weight again, or take the whole file"
            )


def _unquantised(name: str, module: nn.Module) -> str:
    return (
        f"{name or 'the module'} is a {type(module).__name__} whose weight is not quantised yet: bitsandbytes does "
        "that when a module moves. Call model.to(device) first, the CPU is a device too, or load the model by "
        "zero_strategy.integrations.transformers.from_pretrained(..., quantization_config=...)"
    )


def _settle(module: nn.Module, tables: dict[tuple[torch.dtype, torch.device, bytes], Tensor]) -> None:
    """Have a module keep no whole copy of its own, and its weight where it is."""
    if library_class(module, "Linear8bitLt"):
        follow_weight(module)
    elif library_class(module.weight, "Int8Params"):
        module.weight.CB = None  # type: ignore[union-attr]
    else:
        state: Any = module.weight.quant_state  # type: ignore[union-attr]
        load_entries(module)
        if type(bias := parameters_of(module).get("bias")) is nn.Parameter:
            bias.__class__ = CastByLibrary
        for holder in (state, state.state2):
            if holder is not None and not holder.code.is_meta:
                holder.code = _shared(holder.code, tables)
    if getattr(module, _FAST_EVALUATION, False):
        setattr(module, _FAST_EVALUATION, False)


def _shared(table: Tensor, tables: dict[tuple[torch.dtype, torch.device, bytes], Tensor]) -> Tensor:
    """One tensor for all equal tables of code values, of which each layer has its own: a kilobyte or two."""
    key = (table.dtype, table.device, table.detach().cpu().numpy().tobytes())
    return tables.setdefault(key, table)


def library_class(value: object, name: str) -> bool:
    """True if an object is of this class of the library, or of one made of it here."""
    return any(kind.__name__ == name and kind.__module__.startswith(_LIBRARY) for kind in type(value).__mro__)
