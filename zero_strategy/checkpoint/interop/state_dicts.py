"""Weights from state dicts: names without wrappers' prefixes, ties, and modules' extra state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zero_strategy.checkpoint.interop.optimizer_form import renamed
from zero_strategy.checkpoint.portable import PortableState, StoredTensor, loaded

EXTRA_STATE_FILE = "extra_state.pt"
"""Module name -> what its `get_extra_state` gave; the engine gives it back."""

_EXTRA_SUFFIX = "_extra_state"
_INNER = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""FSDP, activation checkpointing and torch.compile put these anywhere into a name."""
_OUTER = ("module.", "_forward_module.")
"""DDP and Fabric put one of these before every name."""


def is_state_dict(value: object) -> bool:
    """Whether it looks like `module.state_dict()`: names to tensors, with modules' extra state between them."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = {key for key, item in value.items() if isinstance(item, (torch.Tensor, StoredTensor))}
    return bool(tensors) and all(key in tensors or key.endswith(_EXTRA_SUFFIX) for key in value)


def unwrapped(names: Iterable[str], prefix: str | None = None) -> Callable[[str], str]:
    """A function that takes wrappers' parts off names.

    Args:
        names: All names.
        prefix: What to take off their beginnings. None: "module." or "_forward_module.", as DDP and Fabric add them, if
            every name begins with it.
    """
    names = [_without_inner(name) for name in names]
    prefixes = _OUTER if prefix is None else (prefix,)
    taken = [outer for outer in prefixes if names and all(name.startswith(outer) for name in names)]

    def rename(name: str) -> str:
        name = _without_inner(name)
        for outer in taken:
            name = name.removeprefix(outer)
        return name

    return rename


def add_weights(state: PortableState, weights: Mapping[str, Any], prefix: str | None = None) -> Callable[[str], str]:
    """Puts a state dict into a portable state.

    Args:
        state: Gets `weights`, `aliases` and the extra state.
        weights: `is_state_dict`; tensors that share their memory are tied.
        prefix: See `unwrapped`.

    Returns:
        The function from a name there to a weight's.
    """
    rename = unwrapped(weights, prefix)
    first: dict[object, str] = {}
    extra: dict[str, Any] = {}
    for key, value in weights.items():
        name = rename(key)
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            extra[name.removesuffix(_EXTRA_SUFFIX).removesuffix(".")] = value
        elif (known := first.setdefault(_identity(value), name)) != name:
            state.aliases[name] = known
        else:
            state.weights[name] = renamed(name, value)
    if extra:
        buffer = io.BytesIO()
        torch.save(extra, buffer)
        state.extra_files[EXTRA_STATE_FILE] = buffer.getvalue()

    def to_stored(key: str) -> str:
        name = rename(key)
        return state.aliases.get(name, name)

    return to_stored


def whole_state_dict(state: PortableState) -> dict[str, Any]:
    """All weights, loaded, under every name they have; tied ones are one tensor. With modules' extra state."""
    weights: dict[str, Any] = {name: loaded(tensor) for name, tensor in state.weights.items()}
    weights |= {alias: weights[name] for alias, name in state.aliases.items()}
    if EXTRA_STATE_FILE in state.extra_files:
        extra = torch.load(io.BytesIO(state.extra_files[EXTRA_STATE_FILE]), weights_only=True)
        weights |= {f"{name}.{_EXTRA_SUFFIX}" if name else _EXTRA_SUFFIX: value for name, value in extra.items()}
    return weights


def _identity(value: torch.Tensor | StoredTensor) -> object:
    """Equal for two names of one tensor; an empty tensor has no memory to share."""
    if isinstance(value, StoredTensor) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def _without_inner(name: str) -> str:
    for part in _INNER:
        name = name.replace(part, "")
    return name
