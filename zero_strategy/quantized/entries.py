"""Entries of state dicts beside a 4-bit weight and its scales: tables of values, and what describes the quantisation.

The layer writes them itself, and its library leaves them to `from_pretrained`: a plain `load_state_dict` would take the
weight and not the offset of its scales, which gives other values. With these hooks it takes both, or refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.quantized.wrapped import PACKED, kept_names
from zero_strategy.runtime.bounded_json import parse
from zero_strategy.runtime.torch_private import parameters_of

TABLES = ("weight.quant_map", "weight.nested_quant_map")
DESCRIPTION = "weight.quant_state.bitsandbytes__"
"""Start of the description's name; it goes on with the kind of 4-bit values."""
_HANDLES, _PREFIX = "_zero_strategy_entries", "_zero_strategy_prefix"


def kept_in_dtype(names: Collection[str]) -> frozenset[str]:
    """Names, among those of a state, of packed values and scales, which mean nothing in another dtype."""
    found = set[str]()
    for name in names:
        if name.endswith((".weight.absmax", ".weight.nested_absmax")):
            found |= {name, name.rpartition(".")[0]}
        elif name == "SCB" or name.endswith(".SCB"):
            found |= {name, f"{name.removesuffix('SCB')}weight"}
    return frozenset(found | kept_names(names) | {name for name in names if is_description(name)})


def load_entries(layer: nn.Module) -> None:
    """Have a layer's `load_state_dict` take them from now on."""
    if _HANDLES not in vars(layer):
        before = layer.register_load_state_dict_pre_hook(_take)
        vars(layer)[_HANDLES] = [before, layer.register_load_state_dict_post_hook(_know)]


def leave_entries(layer: nn.Module) -> None:
    """Undo `load_entries`."""
    for handle in vars(layer).pop(_HANDLES, ()):
        handle.remove()


def _take(layer: Any, entries: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Give the layer's state what describes the values that are about to be loaded."""
    vars(layer)[_PREFIX] = prefix
    state = layer.weight.quant_state
    _refer_to_parameters(layer, state)
    described = [key for key in entries if key.startswith(prefix + DESCRIPTION)]
    if state.nested and not described and f"{prefix}weight.nested_absmax" in entries:
        raise ValueError(undescribed(f"{prefix}weight"))
    fields: dict[str, Any] = {}
    if described:
        fields = parse(bytes(entries[described[0]].cpu().numpy()), described[0])
    mine = {"quant_type": state.quant_type, "blocksize": state.blocksize, "shape": list(state.shape)}
    mine["nested_blocksize"] = state.state2.blocksize if state.nested else None
    for field, value in mine.items() if described else ():
        if fields.get(field) != value:
            raise ValueError(
                f"{prefix}weight is stored with {field} {fields.get(field)}, and the model's has {value}: quantise "
                "the model as it was when it was saved"
            )
    for name, holder in zip(TABLES, (state, state.state2), strict=True):
        table = entries.get(prefix + name)
        if isinstance(table, Tensor) and holder is not None and not torch.equal(table.to(holder.code), holder.code):
            raise ValueError(f"{prefix}{name} is another table than the one that {state.quant_type} has here")
    # After all that is refused: a new offset with the former scales would be other values.
    if described:
        state.dtype = getattr(torch, fields["dtype"])
        if state.nested:
            state.offset.fill_(fields["nested_offset"])


def _refer_to_parameters(layer: nn.Module, state: Any) -> None:
    """Let a layer's state read the parameters that are loaded: a copied module's has copies of them."""
    parameters = parameters_of(layer)
    for name, holder in (("weight.absmax", state), ("weight.nested_absmax", state.state2)):
        if holder is not None and name in parameters:
            holder.absmax = parameters[name]


def check_foreign(names: Iterable[str], what: str, *, described: bool = False) -> None:
    """Refuse to write quantised weights where their descriptions have no place.

    Args:
        names: Of all weights.
        what: Would be written, for the message.
        described: Descriptions of 4-bit weights are written with them; torchao's weights have none.

    Raises:
        ValueError: Naming a weight.
    """
    parts = tuple(f".weight.{name}" for name in (PACKED if described else ("absmax", *PACKED)))
    if packed := next((name for name in names if name.endswith(parts)), None):
        raise ValueError(
            f"{what} would have the quantised weight {packed.rpartition('.')[0]} without what describes it, and "
            "nobody could read it: save the adapter (PEFT's save_pretrained, ZeroTrainer.save_model), keep a "
            "checkpoint of this package (engine.save), or write the values that engine.weights() gives"
        )


def is_description(name: str) -> bool:
    """True for the name of a table, or of a description, of a 4-bit weight."""
    return name.endswith(TABLES) or f".{DESCRIPTION}" in f".{name}"


def described_weight(name: str) -> str:
    """The weight that a table or a description belongs to."""
    return name.removesuffix(".quant_map").removesuffix(".nested_quant_map").partition(".quant_state.")[0]


def undescribed(name: str) -> str:
    """The error for quantised scales that come without their offset."""
    return (
        f"{name} is stored with quantised scales and without what describes them ({DESCRIPTION.removeprefix('weight.')}"
        "nf4, with their offset): its values would be others. Save with engine.save or engine.save_pretrained"
    )


def _know(layer: nn.Module, incompatible: Any) -> None:
    """Leave the entries out of the names that torch reports as unexpected."""
    prefix = vars(layer).pop(_PREFIX, "")
    # Parameters, too: torch takes a name with a dot for one of a module inside, though it has loaded it.
    known = [prefix + name for name in (*TABLES, *parameters_of(layer))]
    unexpected = incompatible.unexpected_keys
    unexpected[:] = [key for key in unexpected if key not in known and not key.startswith(prefix + DESCRIPTION)]
