"""Entries of a module's `state_dict` besides parameters and buffers.

That is `get_extra_state` of any module, and what modules without parameters (metrics) save by overriding `state_dict`
or its parts. It may be of any type, so it goes into the framework's file and not among the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zero_strategy.runtime.torch_private import saves_tensors_itself

EXTRA_KEY = "zero_strategy.extra_state"
"""Its key in the framework's file."""

_SUFFIX = "_extra_state"


def extra_state(module: nn.Module) -> dict[str, Any]:
    """The entries of `module.state_dict()` that are no parameters and no buffers, by full name."""
    found: dict[str, Any] = {}
    for name, child in _savers(module):
        prefix = f"{name}." if name else ""
        tensors = {key for key, _ in [*child.named_parameters(), *child.named_buffers()]}
        state = child.state_dict() if _is_own(child) else {_SUFFIX: child.get_extra_state()}
        found.update({prefix + key: value for key, value in state.items() if key not in tensors})
    return found


def load_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules back what `extra_state` took; names that no module knows are left alone."""
    for name, child in _savers(module):
        prefix = f"{name}." if name else ""
        mine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if _is_own(child):
            if mine:
                child.load_state_dict(mine, strict=False)
        elif _SUFFIX in mine:
            child.set_extra_state(mine[_SUFFIX])


def _savers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if _is_own(child) or type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child


def _is_own(child: nn.Module) -> bool:
    """True if the module saves something of its own that calling its `state_dict` gives, without gathering anything."""
    cls = type(child)
    overrides = (
        cls.state_dict is not nn.Module.state_dict
        or saves_tensors_itself(cls)
        or cls.get_extra_state is not nn.Module.get_extra_state
    )
    return overrides and not any(True for _ in child.parameters())
