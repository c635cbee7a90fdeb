"""Files of `torch.save`, in and out, also with objects of classes that are not installed.

A pickle names a class and gives the instance's attributes. The class is looked up by whoever reads the file.

A file holds a state dict, or a dict with one and, beside it, optimizers, schedulers and counters.

Read is what training scripts usually write, by the names below. Written is, under names that this reads back exactly:

    {"model": state dict, "optimizers": [torch's form], "master_weights": [{name: fp32 tensor}],
     "param_names": [[[names of a group]]], "counters", "lr_scheduler", "loss_scaler", "client_state", "user",
     "extra_files"}

Nothing of a file's choosing runs: it is read by an allow-list, and ours load under `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zero_strategy.checkpoint.disk import naming
from zero_strategy.convert.optimizer_form import (
    add_weights,
    from_torch,
    is_optimizer_state,
    is_state_dict,
    renamed,
    to_torch,
    whole_state_dict,
)
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, Progress, StoredTensor, loaded
from zero_strategy.runtime.regular_files import open_regular


class ForeignObject:
    """An instance of a class elsewhere; see `foreign`. Equal to nothing but itself."""


def foreign(full_name: str, attributes: Mapping[str, Any]) -> ForeignObject:
    """An instance of a class, for `save` to write.

    Args:
        full_name: "module.Class".
        attributes: What the instance's `__dict__` will be where it is read.
    """
    module, _, name = full_name.rpartition(".")
    made: ForeignObject = type(name, (ForeignObject,), {"__module__": module, "__qualname__": name})()
    vars(made).update(attributes)
    return made


def save(value: Any, path: Path) -> None:
    """`torch.save` of a value with `foreign` objects in it.

    Args:
        value: As for `torch.save`.
        path: The file.
    """
    torch.save(value, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))


class _Pickler(pickle._Pickler):
    """Python's own pickler in Python: the one in C cannot be told how to write a class."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, ForeignObject) and obj is not ForeignObject:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


_MODEL = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights", "net")
_OPTIMIZERS = ("optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim")
_SCHEDULERS = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict", "lr_schedulers")
_SCALERS = ("loss_scaler", "scaler", "grad_scaler", "scaler_state_dict")
_STEPS = ("global_steps", "global_step", "step", "iteration", "iter")
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch.save began before they were zip files."""


def detect(path: Path) -> bool:
    """True if it is a file of torch.save."""
    if not path.is_file():
        return False
    with open(open_regular(path), "rb") as file:
        head = file.read(4096)  # the first entry's name begins with the file's own
    return head.startswith(_LEGACY) or (head.startswith(b"PK\x03\x04") and b"/data.pkl" in head)


def read(path: Path, *, prefix: str | None = None, weights_only: bool = False) -> PortableState:
    """Reads a file; its tensors stay on disk until they are asked for.

    Args:
        path: The file.
        prefix: What to take off the beginnings of names; None: what DDP adds.
        weights_only: Leave optimizers out.

    Raises:
        ValueError: If it is damaged, has no state dict, or not only plain data.
    """
    return from_content(load_restricted(path), str(path), prefix=prefix, weights_only=weights_only)


def from_content(content: Any, source: str, *, prefix: str | None = None, weights_only: bool = False) -> PortableState:
    """See `read`; of what a file holds."""
    state = PortableState()
    if is_state_dict(content):
        add_weights(state, content, prefix)
        return state
    rest = dict(content) if isinstance(content, Mapping) else {}
    model = next((key for key in _MODEL if is_state_dict(rest.get(key))), None)
    if model is None:
        found = sorted(map(str, rest)) if rest else type(content).__name__
        raise ValueError(f"{source}: no state dict found: neither the whole file nor one of {_MODEL}; it has {found}")
    rename = add_weights(state, rest.pop(model), prefix)
    own_names = rest.pop("param_names", None)
    masters = rest.pop("master_weights", [])
    specs = {name: tensor.spec for name, tensor in state.weights.items()}
    key = next((key for key in _OPTIMIZERS if optimizer_states(rest.get(key))), None)
    for number, entry in enumerate(optimizer_states(rest.pop(key)) if key else []):
        if weights_only:
            break
        if own_names is not None:
            entry = _with_names(entry, own_names[number])
        optimizer = from_torch(entry, specs, f"{source}: {key}[{number}]", rename)
        if number < len(masters) and masters[number]:
            optimizer.kinds["master"] = {name: renamed(name, tensor) for name, tensor in masters[number].items()}
        state.optimizers.append(optimizer)
    _take_rest(state, rest)
    return state


def write(state: PortableState, path: Path, *, progress: Progress | None = None) -> None:
    """Writes one file, atomically. All of the state is in memory meanwhile, as `torch.save` needs it.

    Raises:
        OSError: If the file system fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            torch.save(to_content(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if progress is not None:
        progress(sum(tensor.spec.nbytes for _, tensor in state.tensors()))


def to_content(state: PortableState) -> dict[str, Any]:
    """Object that `write` gives to torch.save."""
    found: dict[str, Any] = {"model": whole_state_dict(state)}
    if state.optimizers:
        found["optimizers"] = [to_torch(optimizer) for optimizer in state.optimizers]
        found["param_names"] = [[group["params"] for group in entry.param_groups] for entry in state.optimizers]
    if any("master" in optimizer.kinds for optimizer in state.optimizers):
        found["master_weights"] = [_masters(optimizer) for optimizer in state.optimizers]
    return found | rest_of(state)


def rest_of(state: PortableState) -> dict[str, Any]:
    """State besides weights and optimizers that is not empty."""
    keys = ("counters", "lr_scheduler", "loss_scaler", "client_state", "user", "extra_files")
    return {key: value for key in keys if (value := getattr(state, key))}


def optimizer_states(value: Any) -> list[Mapping[str, Any]]:
    """The states in an entry that holds one optimizer's state, or a list or dict of them; else none."""
    if is_optimizer_state(value):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, Sequence) else []
    return list(items) if items and all(map(is_optimizer_state, items)) else []


def _with_names(entry: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    numbers = [p for group in entry["param_groups"] for p in group["params"]]
    of = dict(zip(numbers, [name for group in names for name in group], strict=True))
    groups = [{**group, "params": [of[p] for p in group["params"]]} for group in entry["param_groups"]]
    return {"state": {of[p]: values for p, values in entry["state"].items()}, "param_groups": groups}


def _masters(optimizer: PortableOptimizer) -> dict[str, torch.Tensor]:
    tensors: Mapping[str, StoredTensor] = optimizer.kinds.get("master", {})
    return {name: loaded(tensor) for name, tensor in tensors.items()}


def _take_rest(state: PortableState, rest: dict[str, Any]) -> None:
    """State beside weights and optimizers; values without no place of its own becomes client state."""
    for key in _SCHEDULERS:
        if isinstance(rest.get(key), dict) and state.lr_scheduler is None:
            state.lr_scheduler = rest.pop(key)
    for key in _SCALERS:
        if isinstance(rest.get(key), dict) and "scale" in rest[key] and state.loss_scaler is None:
            state.loss_scaler = rest.pop(key)
    state.counters.update(rest.pop("counters", {}))
    if "global_steps" not in state.counters:
        found = [rest[key] for key in _STEPS if type(rest.get(key)) is int]
        if found:
            state.counters["global_steps"] = found[0]
    state.user.update(rest.pop("user", {}))
    for path, data in rest.pop("extra_files", {}).items():
        state.extra_files.setdefault(path, data)
    client = rest.pop("client_state", {})
    state.client_state.update({**rest, **client} if isinstance(client, dict) else {**rest, "client_state": client})
