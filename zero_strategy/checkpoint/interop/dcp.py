"""Directories of `torch.distributed.checkpoint`, in and out.

Read is what `get_state_dict` or FSDP gave, under "model" and "optimizer" ("optimizer_0", ...) or names alike, nested or
flattened. Written is that, too:

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: ...}}, "param_groups": [{"params": [names], ...}]}}

with "optimizer_0", "optimizer_1", ... where there are several, and "counters", "lr_scheduler" and the like beside them.
fp32 master weights are the key "master" of a parameter's state, which plain torch does not ask for.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.interop.dcp_files import METADATA, DcpFiles
from zero_strategy.checkpoint.interop.optimizer_form import is_optimizer_state, lazy_torch
from zero_strategy.checkpoint.interop.state_dicts import is_state_dict
from zero_strategy.checkpoint.interop.torch_file import from_content, rest_of
from zero_strategy.checkpoint.portable import PortableState, Progress, StoredTensor, loaded
from zero_strategy.runtime.regular_files import is_there

_NUMBERED = re.compile(r"optim(?:izer)?_(\d+)")


def detect(path: Path) -> bool:
    """Whether it is a directory of torch.distributed.checkpoint."""
    return is_there(path / METADATA)


def read(path: Path, *, prefix: str | None = None, weights_only: bool = False) -> PortableState:
    """Reads a directory; its tensors stay on disk until they are asked for.

    Args:
        path: The directory.
        prefix: What to take off the beginnings of names; None: what DDP adds.
        weights_only: Leave optimizers out.

    Raises:
        ValueError: If it is damaged, or no model is found in it.
    """
    return from_content(content_of(path), str(path), prefix=prefix, weights_only=weights_only)


def content_of(path: Path) -> dict[str, Any]:
    """The nested dict that was saved, optimizers in torch's form and numbered ones as a list "optimizers"."""
    tree = DcpFiles(path).tree()
    while len(tree) == 1 and isinstance(inner := next(iter(tree.values())), dict) and _has_model(inner):
        tree = inner  # {"app": {"model": ..., "optimizer": ...}}
    for key, value in tree.items():
        if _is_optimizer(value):
            tree[key] = _optimizer(value)
        elif not is_state_dict(value):
            tree[key] = _resolved(value)
    numbers = {int(found[1]): key for key in tree if (found := _NUMBERED.fullmatch(str(key)))}
    if numbers:
        tree["optimizers"] = [tree.pop(numbers[number]) for number in sorted(numbers)]
    return tree


def write(state: PortableState, path: Path, *, progress: Progress | None = None) -> None:
    """Writes a directory; tensors are loaded one at a time.

    Args:
        state: What to write.
        path: The directory, which must not exist or be empty.
        progress: Is told of the bytes written.

    Raises:
        ValueError: If the directory has something in it.
        OSError: If the file system fails.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from zero_strategy.checkpoint.interop.dcp_planner import LazyPlanner

    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists; it will not be overwritten")
    planner = LazyPlanner(progress)
    content = planner.placeholders(_nested(state))
    with warnings.catch_warnings():
        # It says that it runs without a process group, which is what is wanted.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        try:
            save(content, storage_writer=FileSystemWriter(path, thread_count=1), planner=planner, no_dist=True)
        except CheckpointException as wrapped:
            error, _ = next(iter(wrapped.failures.values()))
            raise error from None


def _nested(state: PortableState) -> dict[str, Any]:
    weights: dict[str, Any] = dict(state.weights)
    weights |= {alias: state.weights[name] for alias, name in state.aliases.items()}
    content: dict[str, Any] = {"model": weights}
    several = len(state.optimizers) > 1
    for number, optimizer in enumerate(state.optimizers):
        content[f"optimizer_{number}" if several else "optimizer"] = lazy_torch(optimizer, named=True)
    return content | rest_of(state)


def _has_model(value: Mapping[str, Any]) -> bool:
    return any(is_state_dict(item) for item in value.values())


def _is_optimizer(value: Any) -> bool:
    return is_optimizer_state(value) or _is_flat_optimizer(value) or _is_stateless(value)


def _is_stateless(value: Any) -> bool:
    """An optimizer without any state: an empty dict leaves no entry."""
    return isinstance(value, Mapping) and value.keys() == {"param_groups"}


def _is_flat_optimizer(value: Any) -> bool:
    """The form of `StateDictOptions(flatten_optimizer_state_dict=True)`."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value)
    )


def _optimizer(value: Mapping[str, Any]) -> dict[str, Any]:
    if not _is_flat_optimizer(value):
        return {"state": value.get("state", {}), "param_groups": [_resolved(group) for group in value["param_groups"]]}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[entry] = item
    groups: list[dict[str, Any]] = []
    for name, entries in options.items():  # parameters with equal options were one group, as far as can be told
        entries = _resolved(entries)
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == entries), None)
        if group is None:
            groups.append({**entries, "params": [name]})
        else:
            group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _resolved(value: Any) -> Any:
    """With tensors instead of what can load them."""
    if isinstance(value, StoredTensor):
        return loaded(value)
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    return value
