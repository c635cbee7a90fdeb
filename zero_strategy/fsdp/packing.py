"""Packing of a bucket in which some parameters stay whole: each lies inside of one rank's slice.

Optimizers such as Muon need whole matrices. A matrix that lies in one slice has an owner: the reduce-scatter brings it
the whole reduced gradient, its state is on that rank alone, and the all-gather carries what it updates, as of any other
slice. No message is added; what is paid is padding, for slices are equally long and matrices are not.

    rank 0                       rank 1
    [ qkv ......... ][ out ][n]  [ up ........ ][bias][ gap ]
      whole                        whole        divisible

Matrices are assigned to slices largest first, each to the slice with the least in it (longest processing time first,
Graham 1969: at most 4/3 of the best). The others fill what is left, in their order, and may be divided. Ranks take
turns from unit to unit, so that those with the fuller slice of one unit have the emptier one of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig


class Packing(TypedDict):
    """Arguments of `build_layout`."""

    whole: Collection[str]
    turn: int


def stays_whole(config: ZeroConfig, unit: str, name: str, shape: Sequence[int], trainable: bool) -> bool:
    """True if a parameter is to lie in one slice: a trained matrix that the settings ask for.

    Args:
        config: Its `matrix_optimizers` say whether there are any, its `matrix_parameters` which.
        unit: Name of the parameter's unit, "" for the root.
        name: Of the parameter.
        shape: Of it, in one piece.
        trainable: Whether it is trained.
    """
    if not config.matrix_optimizers or config.stage == 0 or len(shape) != 2 or not trainable:
        return False
    patterns = config.matrix_parameters
    return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else unit != ""


def pack(
    sizes: Sequence[int], whole: Collection[int], slices: int, step: int, turn: int
) -> tuple[list[tuple[int, int]], int]:
    """Places of parameters in a bucket of equal slices.

    Args:
        sizes: Elements of each, rounded up to the alignment.
        whole: Positions in `sizes` of those that may not be divided.
        slices: Their number.
        step: Slices are multiples of it.
        turn: By how many ranks the slices are turned.

    Returns:
        (position, first element) in the order of the elements, and the elements of a slice.
    """
    bins: list[list[int]] = [[] for _ in range(slices)]
    loads = [0] * slices
    for position in sorted(whole, key=lambda position: (-sizes[position], position)):
        least = loads.index(min(loads))
        bins[least].append(position)
        loads[least] += sizes[position]
    bins = [sorted(bins[(rank - turn) % slices]) for rank in range(slices)]
    others = [position for position in range(len(sizes)) if position not in whole]
    length = max(max(loads), -(-sum(sizes) // slices))
    length = -(-length // step) * step
    while (placed := _placed(sizes, bins, others, length)) is None:
        length += step
    return placed, length


def _placed(
    sizes: Sequence[int], bins: Sequence[Sequence[int]], others: Sequence[int], length: int
) -> list[tuple[int, int]] | None:
    """The places in slices of this length; None if they are too short."""
    found: list[tuple[int, int]] = []
    at, left = 0, list(others)
    for rank, members in enumerate(bins):
        at = max(at, rank * length)
        for position in members:
            found.append((position, at))
            at += sizes[position]
        stop, after = (rank + 1) * length, bins[rank + 1] if rank + 1 < len(bins) else None
        if at > stop:
            return None
        room = 0 if after is None else length - sum(sizes[position] for position in after)
        while left and at < stop and at + sizes[left[0]] <= stop + room:
            found.append((left[0], at))
            at += sizes[left.pop(0)]
    return None if left or at > len(bins) * length else found
