"""State of modules beside parameters and buffers: whatever their state dicts hold besides.

A module adds it by `get_extra_state`, `_save_to_state_dict`, a `state_dict` of its own or hooks of these: metrics,
scales of quantised layers, counters. Rank 0's is saved as files of the checkpoint, and goes back the way that
`load_state_dict` would take.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.guards import is_guard
from zero_strategy.quantized.entries import is_description
from zero_strategy.runtime.torch_private import own_state, saves_tensors_itself, state_dict_hooks_of

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

EXTRA_STATE_FILE = "extra_state.pt"
"""Return values of `get_extra_state`, by module name."""
ENTRIES_FILE = "module_entries.pt"
"""Further entries of state dicts, by their full names."""
_EXTRA_SUFFIX = "_extra_state"


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return values of the modules' `get_extra_state`, by module name."""
    return {
        name: child.get_extra_state()
        for name, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def _writers(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Names and modules that write entries of their own, and whether only their whole `state_dict` has them."""
    inside: str | None = None
    for name, module in root.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if module is not root and type(module).state_dict is not nn.Module.state_dict:
            inside = f"{name}."
            yield name, module, True
        elif saves_tensors_itself(type(module)) or any(not is_guard(hook) for hook in state_dict_hooks_of(module)):
            yield name, module, False


def module_entries(engine: TrainState) -> dict[str, Any]:
    """Entries of the modules' state dicts that are no parameters, no buffers and no extra state, by full name.

    Modules that write such have their parameters gathered meanwhile. A collective where parameters are sharded.
    """
    engine.model.quantised.check()
    found: dict[str, Any] = {}
    for name, module, whole in _writers(engine.module):
        prefix = f"{name}." if name else ""
        known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        usual = {key for key, _ in (*module.named_parameters(), *module.named_buffers())}
        with engine.model.gathered(list(module.parameters(recurse=False))):
            # The very objects: entries are told from parameters and buffers by identity.
            state = module.state_dict(keep_vars=True) if whole else own_state(module, is_guard)
        for key, value in state.items():
            # By name as well: a state dict of the user's own may hold copies.
            if id(value) in known or key in usual or key.split(".")[-1] == _EXTRA_SUFFIX:
                continue
            found[prefix + key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return found


def weight_descriptions(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Entries that describe quantised weights, as their library finds them among the weights of a model's files."""
    return {name: value for name, value in entries.items() if is_description(name)}


def full_entries(engine: TrainState) -> dict[str, Any]:
    """All of this, by the names that it has in a state dict. A collective where parameters are sharded."""
    extra = {f"{name}.{_EXTRA_SUFFIX}" if name else _EXTRA_SUFFIX: s for name, s in extra_states(engine.module).items()}
    return {**extra, **module_entries(engine)}


def load_module_entries(engine: TrainState, entries: Mapping[str, Any]) -> None:
    """Give modules back what `module_entries` took. A collective where parameters are sharded."""
    for name, module, _ in list(_writers(engine.module)) if entries else ():
        prefix = f"{name}." if name else ""
        mine = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
        if not mine:
            continue
        with engine.model.gathered(list(module.parameters())), torch.no_grad():
            # A loader of its own may ask for the usual entries as well: it gets what is there already.
            present = {k: t.detach().clone() for k, t in (*module.named_parameters(), *module.named_buffers())}
            module.load_state_dict({**present, **mine}, strict=False)


def stored(found: Mapping[str, Any], path: str) -> dict[str, bytes]:
    """A file with such entries, {path: content}; none if there are none.

    Raises:
        TypeError: If one could not be read again without running code; names it.
    """
    if not found:
        return {}
    try:
        return {path: _checked(dict(found))}
    except Exception as error:
        for name, value in found.items():
            try:
                _checked(value)
            except Exception:
                raise TypeError(
                    f"the state of module entry {name!r} ({type(value).__name__}) cannot be stored: a checkpoint holds "
                    "tensors, numbers, texts, and lists and dicts of these. Let get_extra_state return such, or allow "
                    "the class by torch.serialization.add_safe_globals"
                ) from error
        raise


def _checked(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    # Tried now: at the time of loading there is no way back.
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True, map_location="cpu")
    return buffer.getvalue()
