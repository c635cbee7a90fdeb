"""DeepSpeed's optimizer files at every ZeRO stage.

Stages 1 and 2 have one vector per param group, divided evenly.

    group g:  | parameter 0 | parameter 1 | ... | padding |      in the order of the model file's `param_shapes[g]`
              |  rank 0's slice  |  rank 1's slice  | ... |

The slices are in `single_partition_of_fp32_groups[g]`, without the padding (bf16 optimizer: with it); moments in
`base_optimizer_state`: a torch state dict, with the padding, or, with `elastic_checkpoint`, a list per group, without.
As padding is only at the end of the whole vector, which may lie on several ranks, joining the slices gives the right
offsets in either case.

Stage 3 divides every parameter among all ranks by itself, and gathers the parts into sub-groups.

    sub-group s of rank r:  | r-th piece of parameter 0 | r-th piece of parameter 1 | ...

A piece has ceil(elements / ranks) elements; the last ones are padded, with whatever was in memory. Sub-groups are parts
of param groups. State that DeepSpeed kept on NVMe is an empty tensor here and a raw file beside the checkpoint.

At stage 0 the optimizer's full state is in the model file, by position instead of by name.

Three forms: a torch state dict (fp32), and two fp16 wrappers, with `fp32_groups` (a list of tensors per group) or
`fp32_groups_flat` (one flat tensor per group). None of them has names, so the parameters are found by order: within a
group they come in the order of the model, and each must have the shape and, where there are fp32 copies, the value of
its place. Where that leaves more than one way, the caller has to say which names each group has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_strategy.convert.deepspeed_model import Flat, MasterState, Source, hyper_parameters, shape_of, split_state
from zero_strategy.convert.pickle_globals import ATTRIBUTES
from zero_strategy.convert.portable import StoredTensor
from zero_strategy.runtime.regular_files import open_regular, path_of, size_of

_SLICES = "single_partition_of_fp32_groups"
_BASE = "base_optimizer_state"


def is_sliced(state: Mapping[str, Any]) -> bool:
    """True if an optimizer file's state is of this form; the bf16 optimizer writes no `zero_stage`."""
    return _SLICES in state and _BASE in state


def rank_count(state: Mapping[str, Any], source: Path) -> int:
    """Number of ranks that saved.

    Raises:
        ValueError: If the file does not say, or groups are divided among different numbers of ranks (experts).
    """
    counts = state.get("partition_count")
    values = set(counts) if isinstance(counts, (list, tuple)) else {counts}
    if len(values) != 1 or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(f"{source}: partition_count is {counts!r}; groups of experts are not read")
    return int(next(iter(values)) or 0)


def read_sliced(
    states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]], sources: Sequence[Path]
) -> MasterState:
    """The optimizer's weights and state by name.

    Args:
        states: The ranks' `optimizer_state_dict`, in rank order.
        shapes: The model file's `param_shapes`, one per group.
        sources: The ranks' files, for errors.

    Raises:
        ValueError: Naming the file and the group, where shapes and data do not agree.
    """
    found = MasterState(loss_scaler=states[0].get("loss_scaler"))
    for state, source in zip(states, sources, strict=True):
        if not isinstance(state.get(_SLICES), (list, tuple)) or len(state[_SLICES]) != len(shapes):
            raise ValueError(f"{source}: lacks the {len(shapes)} param group(s) of the model file: another save")
    groups = _base_groups(states[0][_BASE], len(shapes), sources[0])
    pads = states[0].get("param_alignment_paddings")
    for number, members in enumerate(shapes):
        where = f"{sources[0].parent.name}: param group {number}"
        slices = [state[_SLICES][number] for state in states]
        if not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in slices):
            raise ValueError(f"{where}: a rank's slice of the fp32 weights is no flat tensor")
        flat, lengths = Flat.of(slices), [part.numel() for part in slices]
        gaps = pads[number] if isinstance(pads, (list, tuple)) and number < len(pads) else None
        places = _places(members, gaps, len(flat), 2 * len(states), where)
        kinds, scalars = split_state(
            [_state_of(state[_BASE], number) for state in states], [0] * len(states), f"{where} ({sources[0].name})"
        )
        if "step" in groups[number]:
            scalars.setdefault("step", groups[number]["step"])
        elif isinstance(step := states[0].get("base_optimizer_state_step"), int):
            scalars.setdefault("step", step)
        flats = {kind: _checked(Flat.of(parts), lengths, f"{where}, {kind}") for kind, parts in kinds.items()}
        for name, (shape, start) in places.items():
            found.fp32[name] = flat.stored(name, shape, start)
            for kind, values in flats.items():
                found.add_kind(kind, values.stored(name, shape, start))
        found.add_scalars(list(places), scalars)
        found.optimizer.param_groups.append({**hyper_parameters(groups[number], where), "params": list(places)})
    return found


def _base_groups(base: Any, count: int, source: Path) -> list[dict[str, Any]]:
    """Hyper-parameters per group; an elastic checkpoint has none, and the optimizer that loads it keeps its own."""
    if isinstance(base, (list, tuple)):
        return [{} for _ in range(count)]
    groups = base.get("param_groups") if isinstance(base, dict) else None
    if not isinstance(groups, list) or len(groups) != count:
        raise ValueError(f"{source}: its optimizer state has not the {count} param group(s) of the model file")
    return groups


def _state_of(base: Any, number: int) -> Any:
    if isinstance(base, (list, tuple)):
        return base[number] if number < len(base) else {}
    return base.get("state", {}).get(number, {})


def _places(
    members: Mapping[str, Any], gaps: Any, length: int, alignment: int, where: str
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Parameter -> its shape and where it begins in the group's vector."""
    places, offset = {}, 0
    gaps = list(gaps) if isinstance(gaps, (list, tuple)) and len(gaps) == len(members) else [0] * len(members)
    for (name, value), gap in zip(members.items(), gaps, strict=True):
        shape = shape_of(value, f"{where}, parameter {name!r}")
        places[name] = (shape, offset)
        offset += prod(shape) + int(gap)
    end = offset - (int(gaps[-1]) if gaps else 0)
    # Slices have an even number of elements, so at most 2 * ranks - 1 are padding.
    if not end <= length < offset + alignment:
        raise ValueError(
            f"{where}: its parameters have {offset} elements, the ranks' slices {length}; a rank's file is of another "
            "save"
        )
    return places


def _checked(flat: Flat, lengths: Sequence[int], where: str) -> Flat:
    """Moments must be cut where the weights are: all slices but those at the end are equally long."""
    for mine, other in zip(flat.lengths, lengths):
        if mine < other:
            raise ValueError(f"{where}: a rank has {mine} elements, and {other} of the weights")
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    own = [sum(flat.lengths[:k]) for k in range(len(lengths))]
    for start, mine, length in zip(starts, own, lengths):
        if start != mine and length:
            raise ValueError(f"{where}: is cut at element {mine}, the weights at {start}")
    return flat


_FLAT = "fp32_flat_groups"
_INNER = "optimizer_state_dict"


def is_partitioned(state: Mapping[str, Any]) -> bool:
    """True if an optimizer file's state is of this form."""
    return _FLAT in state


def read_partitioned(
    states: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    sources: Sequence[Path],
    *,
    moments: bool = True,
) -> MasterState:
    """The optimizer's weights and state by name.

    Args:
        states: The ranks' `optimizer_state_dict`, in rank order.
        shapes: The model files' `param_shapes`, one per sub-group.
        sources: The ranks' files, for errors and for the place of swapped state.
        moments: Read more than the weights.

    Raises:
        ValueError: Naming the file and the sub-group, where shapes and data do not agree.
    """
    found = MasterState(loss_scaler=states[0].get("loss_scaler"))
    for state, source in zip(states, sources, strict=True):
        if "ds_zero_partition_groups" in state:
            raise ValueError(f"{source}: has parameters divided among fewer ranks (experts), which are not read")
        if not isinstance(state.get(_FLAT), (list, tuple)) or len(state[_FLAT]) != len(shapes):
            raise ValueError(f"{source}: lacks the {len(shapes)} sub-group(s) of the model file: another save")
    owners = _owners(states[0].get(_INNER), len(shapes), sources[0])
    groups = states[0][_INNER]["param_groups"] if isinstance(states[0].get(_INNER), dict) else []
    found.optimizer.param_groups = [{**hyper_parameters(g, str(sources[0])), "params": []} for g in groups]
    for number, members in enumerate(shapes):
        where = f"{sources[0].parent.name}: sub-group {number}"
        length = _length(members, len(states), where)
        fp32 = _ranks(states, number, None, length, sources)
        every = [_zero3_state_of(state, number) if moments else {} for state in states]
        kinds, scalars = split_state(every, [0] * len(states), where)
        group = groups[owners[number]]
        if "step" in group:
            scalars.setdefault("step", group["step"])
        flats = {kind: _ranks(states, number, kind, length, sources) for kind in kinds}
        offset = 0
        for name, value in members.items():
            shape = shape_of(value, f"{where}, parameter {name!r}")
            found.fp32[name] = fp32.stored_by_rank(name, shape, offset)
            for kind, flat in flats.items():
                found.add_kind(kind, flat.stored_by_rank(name, shape, offset))
            offset += -(-prod(shape) // len(states))
        found.add_scalars(list(members), scalars)
        found.optimizer.param_groups[owners[number]]["params"] += list(members)
    return found


def _owners(inner: Any, count: int, source: Path) -> list[int]:
    """Sub-group -> its param group."""
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list):
        raise ValueError(f"{source}: has no param groups")
    owners = {number: index for index, group in enumerate(groups) for number in group.get("params", ())}
    if owners.keys() != set(range(count)):
        raise ValueError(f"{source}: its param groups hold the sub-groups {sorted(owners)}, the model file has {count}")
    return [owners[number] for number in range(count)]


def _length(members: Mapping[str, Any], ranks: int, where: str) -> int:
    return sum(-(-prod(shape_of(value, f"{where}, parameter {name!r}")) // ranks) for name, value in members.items())


def _zero3_state_of(state: Mapping[str, Any], number: int) -> Any:
    return state[_INNER].get("state", {}).get(number, {})


def _ranks(
    states: Sequence[Mapping[str, Any]], number: int, kind: str | None, length: int, sources: Sequence[Path]
) -> Flat:
    """The ranks' buffers of one kind of state (None: the weights), wherever they are."""
    parts: list[Source] = []
    dtype = torch.float32
    for rank, (state, source) in enumerate(zip(states, sources, strict=True)):
        weights = state[_FLAT][number]
        tensor = weights if kind is None else _zero3_state_of(state, number)[kind]
        if not isinstance(weights, torch.Tensor) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{source}: sub-group {number} is no tensor")
        dtype = tensor.dtype
        if tensor.numel() == 0 and length:
            parts.append(swapped(source.parent, rank, weights, number, kind, length, dtype))
        elif tensor.numel() != length:
            raise ValueError(
                f"{source}: sub-group {number} ({kind or 'weights'}) has {tensor.numel()} elements, the shapes in the "
                f"model file ask for {length}; it is of another save or another number of ranks"
            )
        else:
            parts.append(_giving(tensor.reshape(-1)))
    return Flat(parts, [length] * len(parts), dtype)


def _giving(tensor: torch.Tensor) -> Source:
    return lambda: tensor


def swapped(
    directory: Path, rank: int, weights: torch.Tensor, number: int, kind: str | None, length: int, dtype: torch.dtype
) -> Source:
    """A buffer in `offloaded_tensors/rankRR/[kind-]FIRST_LAST.tensor.swp`, raw and possibly longer than the data.

    FIRST and LAST are the ids of the sub-group's parameters, an attribute of the tensor.

    Raises:
        ValueError: If the file is missing or too short.
    """
    attributes = getattr(weights, ATTRIBUTES, {})
    key = attributes.get("ds_id") if isinstance(attributes, dict) else None
    folder = directory / "offloaded_tensors" / f"rank{rank:02d}"
    if not isinstance(key, (str, int)) or not (name := str(key)).replace("_", "").isalnum():
        raise ValueError(
            f"{directory}: rank {rank}'s sub-group {number} is empty and does not say where on NVMe it was kept"
        )
    path = folder / (f"{name}.tensor.swp" if kind is None else f"{kind}-{name}.tensor.swp")
    needed = length * dtype.itemsize
    if (size := size_of(path)) is None:
        raise ValueError(f"{path}: is missing; it holds the {kind or 'weights'} of sub-group {number} of rank {rank}")
    if size < needed:
        raise ValueError(f"{path}: has {size} bytes, sub-group {number} takes {needed}: it is truncated")

    def load() -> torch.Tensor:
        with open(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size < needed:
                raise ValueError(f"{path}: was replaced by a shorter file while it was being read")
            return torch.from_file(path_of(file.fileno(), path), shared=False, size=length, dtype=dtype)

    return load


_MOST_WAYS = 10_000

Weights = Mapping[str, torch.Tensor]
"""Parameters of the model by name, in its order, tied ones once."""


@dataclass(frozen=True)
class _Group:
    """Ways in which parameters may be ordered in a file.

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
