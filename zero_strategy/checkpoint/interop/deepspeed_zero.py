"""Optimizer files of ZeRO 1 and 2, and of the bf16 optimizer: per param group one vector, sliced evenly.

    group g:  | parameter 0 | parameter 1 | ... | padding |      in the order of the model file's `param_shapes[g]`
              |  rank 0's slice  |  rank 1's slice  | ... |

The slices are in `single_partition_of_fp32_groups[g]`, without the padding (bf16 optimizer: with it); moments in
`base_optimizer_state`: a torch state dict, with the padding, or, with `elastic_checkpoint`, a list per group, without.
As padding is only at the end of the whole vector, which may lie on several ranks, joining the slices gives the right
offsets in either case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.interop.deepspeed_flat import Flat, shape_of
from zero_strategy.checkpoint.interop.deepspeed_optimizer import MasterState, hyper_parameters, split_state

_SLICES = "single_partition_of_fp32_groups"
_BASE = "base_optimizer_state"


def is_sliced(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer file's state is of this form; the bf16 optimizer writes no `zero_stage`."""
    return _SLICES in state and _BASE in state


def rank_count(state: Mapping[str, Any], source: Path) -> int:
    """How many ranks saved.

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
