"""Which names the numbered parameters of an optimizer have, where nothing but the order and shapes tells.

torch numbers parameters through the groups. Nearly always a group is a part of `model.parameters()` in its order, so
the question is how the groups interleave, and which weights are buffers or frozen and in none. What shapes leave open
is an error, not a guess: moments of one parameter on another of the same shape would be wrong, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_strategy.checkpoint.layout import TensorSpec

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
    """At most two assignments: of each group the numbers of its weights.

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
