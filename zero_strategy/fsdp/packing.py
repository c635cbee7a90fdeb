"""Packing of a bucket whose parameters stay whole: each lies inside of one rank's slice.

Optimizers such as Shampoo need whole matrices (of Muon, `optim.muon` knows the part that does). A matrix that lies in
one slice has an owner: the reduce-scatter brings it the whole reduced gradient, its state is on that rank alone, and
the all-gather carries what it updates, as of any other slice. No message is added; what is paid is padding, for slices
are equally long and matrices are not.

    rank 0                     rank 1
    [ gate ......... ][ q ]    [ up ........... ][ k ][ gap ]

Matrices are assigned to slices largest first, each to the slice with the least in it (longest processing time first,
Graham 1969: at most 4/3 of the best). Ranks take turns from unit to unit, so that those with the fuller slice of one
unit have the emptier one of the next. Other parameters of a unit have a bucket of their own: each optimizer publishes
its buckets after its step, and no bucket is published twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig


def lies_apart(config: ZeroConfig, unit: str, name: str, shape: Sequence[int], trainable: bool) -> bool:
    """True if a parameter is to share no bucket but with its like: a trained matrix that the settings ask for.

    With `matrix_optimizers`, patterns choose parameters of any dimensions, such as vectors of which norms are taken.

    Args:
        config: Its `matrix_optimizers` and `matrix_parameters` say whether there are any, the latter which.
        unit: Name of the parameter's unit, "" for the root.
        name: Of the parameter.
        shape: Of it, in one piece.
        trainable: Whether it is trained.
    """
    patterns = config.matrix_parameters
    if not (config.matrix_optimizers or patterns) or config.stage == 0 or not trainable:
        return False
    if len(shape) != 2 and not (patterns and config.matrix_optimizers and len(shape)):
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else unit != ""


def pack(sizes: Sequence[int], slices: int, step: int, turn: int) -> tuple[list[tuple[int, int]], int]:
    """Places of parameters in a bucket of equal slices, none of which is divided.

    Args:
        sizes: Elements of each, rounded up to the alignment.
        slices: Their number.
        step: Slices are multiples of it.
        turn: By how many ranks the slices are turned.

    Returns:
        (position in `sizes`, first element) in the order of the elements, and the elements of a slice.
    """
    bins: list[list[int]] = [[] for _ in range(slices)]
    loads = [0] * slices
    for position in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        least = loads.index(min(loads))
        bins[least].append(position)
        loads[least] += sizes[position]
    length = -(-max(loads) // step) * step
    placed = []
    for rank in range(slices):
        at = rank * length
        for position in sorted(bins[(rank - turn) % slices]):
            placed.append((position, at))
            at += sizes[position]
    return placed, length
