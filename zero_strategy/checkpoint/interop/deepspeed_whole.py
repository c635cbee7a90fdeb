"""Stage 0: the optimizer's whole state lies in the model file, by position instead of by name.

Three forms: a torch state dict (fp32), and two fp16 wrappers, with `fp32_groups` (a list of tensors per group) or
`fp32_groups_flat` (one flat tensor per group). None of them has names, so the parameters are found by order: within a
group they come in the order of the model, and each must have the shape and, where there are fp32 copies, the value of
its place. Where that leaves more than one way, the caller has to say which names each group has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.interop.deepspeed_flat import Flat
from zero_strategy.checkpoint.interop.deepspeed_optimizer import MasterState, hyper_parameters, split_state
from zero_strategy.checkpoint.portable import StoredTensor

_MOST_WAYS = 10_000

Weights = Mapping[str, torch.Tensor]
"""Parameters of the model by name, in its order, tied ones once."""


@dataclass(frozen=True)
class _Group:
    """Where parameters may go.

    Attributes:
        fits: (place, name) -> the next place, or None if the parameter does not belong there.
        end: The place after the last.
        empty: Places of parameters without state, where any would do.
    """

    fits: Callable[[int, str], int | None]
    end: int
    empty: frozenset[int] = frozenset()


def read_whole(
    optimizer: Mapping[str, Any], weights: Weights, source: Path, groups: Sequence[Sequence[str]] | None = None
) -> MasterState:
    """The optimizer's weights and state by name.

    Args:
        optimizer: The model file's entry `optimizer`.
        weights: The model's parameters, and no buffers.
        source: The model file, for errors.
        groups: Names of the parameters of each group, where they cannot be told.

    Raises:
        ValueError: If the names cannot be told, or the given ones do not fit.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise ValueError(f"{source}: its optimizer state is of an unknown form ({sorted(optimizer)[:8]})")
    scaler = optimizer if "cur_scale" in optimizer else None
    found = MasterState(loss_scaler=scaler)
    copies = optimizer.get("fp32_groups")
    flats = optimizer.get("fp32_groups_flat")
    if flats is not None:
        members = _named([_flat_group(flat, weights) for flat in flats], weights, groups, source)
        _read_flat(found, inner, flats, members, weights, source)
        return found
    slots = [list(group["params"]) for group in inner["param_groups"]]
    shapes = [[_shape(inner["state"].get(index)) for index in group] for group in slots]
    if copies is None:
        options = [_listed_group(shape, None, weights) for shape in shapes]
    else:
        options = [_listed_group([tuple(t.shape) for t in group], group, weights) for group in copies]
    members = _named(options, weights, groups, source)
    for number, (names, indices) in enumerate(zip(members, slots, strict=True)):
        for place, (name, index) in enumerate(zip(names, indices, strict=True)):
            if copies is not None:
                found.fp32[name] = StoredTensor.of(name, copies[number][place])
            _read_state(found, name, inner["state"].get(index, {}), weights[name].numel(), source)
        group = hyper_parameters(inner["param_groups"][number], str(source))
        found.optimizer.param_groups.append({**group, "params": list(names)})
    return found


def _read_state(found: MasterState, name: str, state: Any, numel: int, source: Path) -> None:
    where = f"{source}: parameter {name!r}"
    shaped = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and v.numel() == numel}
    rest, scalars = split_state([{k: v for k, v in state.items() if k not in shaped}], [numel + 1], where)
    assert not rest
    if numel == 1:  # of a parameter without dimensions: its state has none, either, except for the step count
        for key in [k for k, v in scalars.items() if isinstance(v, torch.Tensor) and k != "step"]:
            shaped[key] = scalars.pop(key)
    for kind, tensor in shaped.items():
        found.add_kind(kind, StoredTensor.of(name, tensor))
    found.add_scalars([name], scalars)


def _read_flat(
    found: MasterState, inner: Mapping[str, Any], flats: Any, members: list[list[str]], weights: Weights, source: Path
) -> None:
    for number, names in enumerate(members):
        where = f"{source}: param group {number}"
        group = inner["param_groups"][number]
        index = group["params"][0] if group["params"] else None
        kinds, scalars = split_state([inner["state"].get(index, {})], [flats[number].numel()], where)
        if "step" in group:
            scalars.setdefault("step", group["step"])
        flat, offset = Flat.of([flats[number]]), 0
        for name in names:
            shape = tuple(weights[name].shape)
            found.fp32[name] = flat.stored(name, shape, offset)
            for kind, parts in kinds.items():
                found.add_kind(kind, Flat.of(parts).stored(name, shape, offset))
            offset += weights[name].numel()
        found.add_scalars(names, scalars)
        found.optimizer.param_groups.append({**hyper_parameters(group, where), "params": list(names)})


# ---- which parameter is where ----


def _shape(state: Any) -> tuple[int, ...] | None:
    """The shape that a parameter's state tells, or None."""
    tensors = [v for k, v in (state or {}).items() if isinstance(v, torch.Tensor) and k != "step"]
    return tuple(tensors[0].shape) if tensors else None


def _listed_group(shapes: Sequence[tuple[int, ...] | None], copies: Any, weights: Weights) -> _Group:
    def fits(place: int, name: str) -> int | None:
        if place == len(shapes) or shapes[place] not in (None, tuple(weights[name].shape)):
            return None
        same = copies is None or torch.equal(copies[place].to(weights[name].dtype), weights[name])
        return place + 1 if same else None

    empty = frozenset(place for place, shape in enumerate(shapes) if shape is None)
    return _Group(fits, len(shapes), empty)


def _flat_group(flat: torch.Tensor, weights: Weights) -> _Group:
    def fits(place: int, name: str) -> int | None:
        weight, stop = weights[name], place + weights[name].numel()
        if stop > flat.numel() or stop == place:
            return None
        return stop if torch.equal(flat[place:stop].to(weight.dtype), weight.reshape(-1)) else None

    return _Group(fits, flat.numel())


def _named(
    groups: Sequence[_Group], weights: Weights, given: Sequence[Sequence[str]] | None, source: Path
) -> list[list[str]]:
    """The names of each group's parameters."""
    if given is not None:
        return _as_given(groups, weights, given, source)
    ways = _ways(groups, weights)
    if len(ways) == 1:
        return ways[0]
    problem = "more than one way" if ways else "no way"
    raise ValueError(
        f"{source}: a stage-0 checkpoint has no parameter names for its optimizer state, and there is {problem} to "
        f"give the model's {len(weights)} parameters to its {len(groups)} param group(s) in order; pass groups=[[names "
        "of group 0], ...], or read the weights alone (optimizer=False)"
    )


def _as_given(groups: Sequence[_Group], weights: Weights, given: Any, source: Path) -> list[list[str]]:
    if len(given) != len(groups):
        raise ValueError(f"{source}: has {len(groups)} param group(s), groups names {len(given)}")
    for number, (group, names) in enumerate(zip(groups, given, strict=True)):
        place: int | None = 0
        for name in names:
            if name not in weights:
                raise ValueError(f"{source}: has no parameter {name!r}, which groups[{number}] names")
            place = group.fits(place or 0, name)
            if place is None:
                raise ValueError(f"{source}: parameter {name!r} does not fit its place in param group {number}")
        if place != group.end:
            raise ValueError(f"{source}: param group {number} has more parameters than groups[{number}] names")
    return [list(names) for names in given]


def _ways(groups: Sequence[_Group], weights: Weights) -> list[list[list[str]]]:
    """Up to two ways to give parameters, in order, to the groups so that these are filled; some may be left over.

    Ways that differ only in where parameters without state go are one: of them, the first is taken.
    """
    reached: dict[tuple[int, ...], dict[int, _Way]] = {tuple(0 for _ in groups): {0: None}}
    for name in weights:
        following = {places: dict(ways) for places, ways in reached.items()}
        for places, ways in reached.items():
            for number, group in enumerate(groups):
                place = group.fits(places[number], name)
                if place is None:
                    continue
                target = following.setdefault((*places[:number], place, *places[number + 1 :]), {})
                for key, way in ways.items():
                    told = key if places[number] in group.empty else hash((key, number, name))
                    if len(target) < 2:
                        target.setdefault(told, (way, number, name))
        reached = following
        if len(reached) > _MOST_WAYS:
            break
    found = []
    for way in reached.get(tuple(group.end for group in groups), {}).values():
        members: list[list[str]] = [[] for _ in groups]
        while way is not None:
            way, number, name = way
            members[number].insert(0, name)
        found.append(members)
    return found


_Way = tuple[Any, int, str] | None
"""A way so far, its last step outermost: (the way before, group, parameter)."""
