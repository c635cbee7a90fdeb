"""Optimizer state in the form of torch's `Optimizer.state_dict()`, and ours.

torch's form (docs of `torch.optim.Optimizer.state_dict`):

    {"state": {parameter: {key: tensor or number}}, "param_groups": [{..., "params": [parameter, ...]}]}

A parameter is a number counted through the groups, or a name, as in what `torch.distributed.checkpoint.state_dict` and
FSDP give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_strategy.checkpoint.interop.parameter_order import match_names
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.names import is_text
from zero_strategy.checkpoint.portable import PortableOptimizer, StoredTensor, loaded

Lazy = torch.Tensor | StoredTensor


def is_optimizer_state(value: object) -> bool:
    """Whether it has torch's form."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def from_torch(
    state: Mapping[str, Any],
    weights: Mapping[str, TensorSpec],
    source: str,
    rename: Callable[[str], str] = lambda name: name,
    *,
    ordered: bool = True,
) -> PortableOptimizer:
    """Turns torch's form into ours.

    Args:
        state: `is_optimizer_state`; its tensors may be `StoredTensor`s of any name.
        weights: The weights' specs in the order of the state dict, each tied tensor once.
        source: Where it is from, for errors.
        rename: From a name in `state` to a weight's.
        ordered: Whether the weights' order is the model's.

    Returns:
        Ours; `unnamed` if parameters are numbered and it is not certain which names they have.

    Raises:
        ValueError: If a value is of a kind that cannot be stored.
    """
    order, unnamed = _names(state, weights, source, rename, ordered)
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        | {"params": [order[p] for p in group["params"]]}
        for group in state["param_groups"]
    ]
    found = PortableOptimizer(param_groups=groups, unnamed=unnamed)
    entries = {order[p]: values for p, values in state["state"].items() if p in order}
    if strays := [p for p in state["state"] if p not in order]:
        raise ValueError(f"{source}: optimizer state of {strays[:5]}, which no param group has")
    numbers = _number_keys(entries, weights)
    rank = {name: place for place, name in enumerate(weights)}
    for name in sorted(entries, key=lambda name: rank.get(name, len(rank))):
        for key, value in entries[name].items():
            _put(found, name, str(key), value, key in numbers, source)
    return found


def to_torch(optimizer: PortableOptimizer, *, named: bool = False) -> dict[str, Any]:
    """Turns ours into torch's form, master weights left out.

    Args:
        optimizer: The state; all its tensors are loaded.
        named: Parameters by name instead of by number.
    """
    lazy = lazy_torch(optimizer, named=named)
    return {
        "state": {
            parameter: {key: _loaded(value) for key, value in values.items() if key != "master"}
            for parameter, values in lazy["state"].items()
        },
        "param_groups": lazy["param_groups"],
    }


def lazy_torch(optimizer: PortableOptimizer, *, named: bool) -> dict[str, Any]:
    """`to_torch` with `StoredTensor`s instead of tensors of parameters' shapes, and with "master"."""
    numbers: dict[str, int] = {}
    for group in optimizer.param_groups:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    state: dict[Any, dict[str, Any]] = {}
    for name, number in numbers.items():
        values: dict[str, Any] = {
            key: torch.tensor(value, dtype=getattr(torch, optimizer.scalar_dtypes[key]))
            if key in optimizer.scalar_dtypes
            else value
            for key, value in optimizer.scalars.get(name, {}).items()
        }
        values |= {kind: tensors[name] for kind, tensors in optimizer.kinds.items() if name in tensors}
        if values:
            state[name if named else number] = values
    groups = [
        {**group, "params": [name if named else numbers[name] for name in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _loaded(value: Any) -> Any:
    return loaded(value) if isinstance(value, StoredTensor) else value


def _names(
    state: Mapping[str, Any],
    weights: Mapping[str, TensorSpec],
    source: str,
    rename: Callable[[str], str],
    ordered: bool,
) -> tuple[dict[Any, str], str]:
    """Parameter, as `state` calls it -> name; and why these are no names, if so."""
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    parameters = [p for group in groups for p in group["params"]]
    if all(isinstance(p, str) for p in parameters):
        return {p: rename(p) for p in parameters}, ""
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        pairs = [pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True)]
        return {p: rename(name) for p, name in pairs}, ""
    shapes = {p: _shape(values) for p, values in state["state"].items()}
    try:
        matched = match_names([[shapes.get(p) for p in group["params"]] for group in groups], weights, ordered)
    except ValueError as error:
        return {p: f"#{number}" for number, p in enumerate(parameters)}, f"{source}: {error}"
    return dict(zip(parameters, [name for group in matched for name in group], strict=True)), ""


def _shape(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """A parameter's shape, as far as its state tells: that of the largest tensor in it."""
    shapes = [_spec(value).shape for key, value in values.items() if isinstance(value, Lazy) and key != "step"]
    return max(shapes, key=lambda shape: (torch.Size(shape).numel(), len(shape)), default=None)


def _number_keys(entries: Mapping[str, Mapping[str, Any]], weights: Mapping[str, TensorSpec]) -> set[str]:
    """Keys whose 0-d tensors are numbers, and not moments of 0-d parameters."""
    keys = {"step"}
    for name, values in entries.items():
        if name in weights and weights[name].shape:
            keys |= {key for key, value in values.items() if isinstance(value, Lazy) and not _spec(value).shape}
    return keys


def _put(found: PortableOptimizer, name: str, key: str, value: Any, number: bool, source: str) -> None:
    if not is_text(key):
        raise ValueError(f"{source}: optimizer state {key!r} of parameter {name!r} is no name in UTF-8")
    if isinstance(value, Lazy) and number and not _spec(value).shape:
        tensor = value.load() if isinstance(value, StoredTensor) else value
        found.scalars.setdefault(name, {})[key] = tensor.item()
        found.scalar_dtypes[key] = str(tensor.dtype).removeprefix("torch.")
    elif isinstance(value, Lazy):
        found.kinds.setdefault(key, {})[name] = renamed(name, value)
    elif value is None or isinstance(value, (bool, int, float, str)):
        found.scalars.setdefault(name, {})[key] = value
    else:
        raise ValueError(
            f"{source}: optimizer state {key!r} of parameter {name!r} is a {type(value).__name__}, which cannot be "
            "stored: only tensors, numbers and strings can"
        )


def renamed(name: str, value: Lazy) -> StoredTensor:
    """A tensor under another name."""
    return StoredTensor.of(name, value) if isinstance(value, torch.Tensor) else value.named(name)


def _spec(value: Lazy) -> TensorSpec:
    return value.spec if isinstance(value, StoredTensor) else TensorSpec.of("", value)


def _plain(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        value = value.load()
    if isinstance(value, torch.Tensor):
        return value.item() if value.dim() == 0 else value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
