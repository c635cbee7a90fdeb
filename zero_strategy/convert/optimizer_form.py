"""Optimizer state in torch's form and ours, names of numbered parameters, weights of state dicts.

Parameters are numbered by torch through the groups. Nearly always a group is a part of `model.parameters()` in its
order, so the question is how the groups interleave, and which weights are buffers or frozen and in none. Where shapes
leave that open it is an error, not a guess: moments of one parameter on another of the same shape would be wrong, and
nobody would notice.

The form of torch (docs of `torch.optim.Optimizer.state_dict`):

    {"state": {parameter: {key: tensor or number}}, "param_groups": [{..., "params": [parameter, ...]}]}

A parameter is a number counted through the groups, or a name, as in what `torch.distributed.checkpoint.state_dict` and
FSDP give.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec, is_text
from zero_strategy.checkpoint.module_state import ENTRIES_FILE, EXTRA_STATE_FILE
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor, loaded
from zero_strategy.optim import lbfgs
from zero_strategy.runtime.nested_state import flattened, nested

Shape = tuple[int, ...]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalisation layers."""
_MAX_STATES = 100_000


def match_names(
    groups: Sequence[Sequence[Shape | None]], weights: Mapping[str, TensorSpec], ordered: bool = True
) -> list[list[str]]:
    """Finds the only assignment of weights to the groups' parameters that keeps the order in each group.

    Args:
        groups: Of each group's parameters the shapes; None where unknown.
        weights: In the order of the state dict.
        ordered: False if their order is another one.

    Returns:
        The names of each group's parameters.

    Raises:
        ValueError: If there is none, or more than one.
    """
    if not ordered:
        raise _error("the weights beside it are not in the model's order")
    names = [name for name, spec in weights.items() if _may_be_trained(name, spec)]
    shapes = [weights[name].shape for name in names]
    count = sum(map(len, groups))
    if len(groups) == 1 and count == len(names):
        if any(mine is not None and mine != shape for mine, shape in zip(groups[0], shapes, strict=True)):
            raise _error("their shapes are not those of the weights, in this order")
        return [names]
    found = _assignments(groups, shapes, count < len(names))
    if not found:
        raise _error(f"no assignment of its {count} parameters to the {len(names)} weights fits the shapes")
    if len(found) > 1:
        raise _error("the shapes fit in several ways")
    return [[names[place] for place in group] for group in found[0]]


def _may_be_trained(name: str, spec: TensorSpec) -> bool:
    is_float = spec.dtype.is_floating_point or spec.dtype.is_complex
    return is_float and name.rpartition(".")[2] not in _STATISTICS


def _error(why: str) -> ValueError:
    return ValueError(
        f"the optimizer's parameters have numbers only, and which names they have is not certain: {why}. Give their "
        "names in the optimizer's order (--names), load the checkpoint into the engine with the optimizer attached, or "
        "convert the weights alone (--weights-only)"
    )


@dataclass(frozen=True)
class _Way:
    """Weights that were given to groups so far: the last one's number and group, and the way before it."""

    place: int
    group: int
    before: _Way | None


def _assignments(
    groups: Sequence[Sequence[Shape | None]], shapes: Sequence[Shape], may_skip: bool
) -> list[list[list[int]]]:
    """Up to two assignments: of each group the numbers of its weights.

    Weight by weight, each state (how many parameters of each group are taken) keeps at most two ways that lead there.
    """
    states: dict[tuple[int, ...], list[_Way | None]] = {tuple(0 for _ in groups): [None]}
    for place, shape in enumerate(shapes):
        following: dict[tuple[int, ...], list[_Way | None]] = {}
        for taken, ways in states.items():
            for number, group in enumerate(groups):
                at = taken[number]
                if at < len(group) and group[at] in (None, shape):
                    kept = following.setdefault((*taken[:number], at + 1, *taken[number + 1 :]), [])
                    kept.extend(_Way(place, number, way) for way in ways[: 2 - len(kept)])
            if may_skip:
                kept = following.setdefault(taken, [])
                kept.extend(ways[: 2 - len(kept)])
        states = following
        if len(states) > _MAX_STATES:
            return []
    return [_unrolled(way, len(groups)) for way in states.get(tuple(map(len, groups)), [])]


def _unrolled(way: _Way | None, count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    while way is not None:
        groups[way.group].append(way.place)
        way = way.before
    return [group[::-1] for group in groups]


Lazy = torch.Tensor | StoredTensor


def is_optimizer_state(value: object) -> bool:
    """True if it has torch's form."""
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
    if len(entries) == 1 and lbfgs.is_state(only := next(iter(entries.values()))):
        names, only = list(order.values()), {key: _loaded(value) for key, value in only.items()}
        if all(name in weights for name in names):
            shapes = [torch.Size(weights[name].shape) for name in names]
            entries = dict(zip(names, lbfgs.divided(only, shapes), strict=True))
    numbers = _number_keys(entries, weights)
    rank = {name: place for place, name in enumerate(weights)}
    for name in sorted(entries, key=lambda name: rank.get(name, len(rank))):
        for key, value in flattened(entries[name]).items():
            _put(found, name, str(key), value, key in numbers, source)
    return found


def to_torch(optimizer: PortableOptimizer, *, named: bool = False) -> dict[str, Any]:
    """Turns ours into torch's form, master weights left out.

    Args:
        optimizer: The state; all its tensors are loaded.
        named: Parameters by name instead of by number.
    """
    lazy = lazy_torch(optimizer, named=named)
    state = {
        parameter: {key: _loaded(value) for key, value in values.items() if key != "master"}
        for parameter, values in lazy["state"].items()
    }
    if state and all(map(lbfgs.is_state, state.values())):
        state = {next(iter(state)): lbfgs.joined(list(state.values()))}
    return {"state": state, "param_groups": lazy["param_groups"]}


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
            state[name if named else number] = nested(values)
    groups = [
        {**group, "params": [name if named else numbers[name] for name in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _loaded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(item) for item in value)
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
    shapes = {p: _shape(values) for p, values in state["state"].items() if not lbfgs.is_state(values)}
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


_EXTRA_SUFFIX = "_extra_state"
_INNER = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""FSDP, activation checkpointing and torch.compile put these anywhere into a name."""
_OUTER = ("module.", "_forward_module.")
"""DDP and Fabric put one of these before every name."""


def is_state_dict(value: object) -> bool:
    """True if it looks like `module.state_dict()`: names to tensors, with modules' extra state between them."""
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
    if ENTRIES_FILE in state.extra_files:
        weights |= torch.load(io.BytesIO(state.extra_files[ENTRIES_FILE]), weights_only=True)
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
