"""Optimizer files of ZeRO 3: every parameter divided among all ranks by itself, gathered into sub-groups.

    sub-group s of rank r:  | r-th piece of parameter 0 | r-th piece of parameter 1 | ...

A piece has ceil(elements / ranks) elements; the last ones are padded, with whatever was in memory. Sub-groups are parts
of param groups. State that DeepSpeed kept on NVMe is an empty tensor here and a raw file beside the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.interop.deepspeed_flat import Flat, Source, shape_of
from zero_strategy.checkpoint.interop.deepspeed_optimizer import MasterState, hyper_parameters, split_state
from zero_strategy.checkpoint.interop.pickles import ATTRIBUTES
from zero_strategy.runtime.regular_files import open_regular, path_of, size_of

_FLAT = "fp32_flat_groups"
_INNER = "optimizer_state_dict"


def is_partitioned(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer file's state is of this form."""
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
        every = [_state_of(state, number) if moments else {} for state in states]
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


def _state_of(state: Mapping[str, Any], number: int) -> Any:
    return state[_INNER].get("state", {}).get(number, {})


def _ranks(
    states: Sequence[Mapping[str, Any]], number: int, kind: str | None, length: int, sources: Sequence[Path]
) -> Flat:
    """The ranks' buffers of one kind of state (None: the weights), wherever they are."""
    parts: list[Source] = []
    dtype = torch.float32
    for rank, (state, source) in enumerate(zip(states, sources, strict=True)):
        weights = state[_FLAT][number]
        tensor = weights if kind is None else _state_of(state, number)[kind]
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
