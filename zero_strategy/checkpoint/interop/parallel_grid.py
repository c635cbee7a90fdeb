"""Which files of a checkpoint that was saved on a grid of ranks belong to each rank of a smaller grid.

A grid has a pipeline, a tensor and a data dimension. Model files are numbered `pp * tp_degree + tp`, optimizer files
`dp * pp_degree * tp_degree + pp * tp_degree + tp`. A smaller grid has neighbours merged: along pipeline and tensor,
rank i of n takes the i-th of n equal blocks. Along data, the files of a merged pipeline and tensor position are put in
a row, position by position and for each all its data ranks, and the row is cut into equal parts; that is the order in
which DeepSpeed merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Cells = dict[tuple[int, int], list[int]]
"""(pipeline rank, tensor rank) -> numbers of files."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of a grid of ranks, each at least 1."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"the {name} degree of a grid must be at least 1, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp

    def __str__(self) -> str:
        return f"pp {self.pp}, tp {self.tp}, dp {self.dp}"


def parts(items: Sequence[T], count: int, what: str = "items") -> list[list[T]]:
    """Cuts a sequence into equal parts.

    Raises:
        ValueError: If the parts would not be equal.
    """
    if count < 1 or len(items) % count:
        raise ValueError(f"{len(items)} {what} cannot be divided into {count} equal parts")
    size = len(items) // count
    return [list(items[number * size : (number + 1) * size]) for number in range(count)]


def obstacles(source: Degrees, target: Degrees) -> list[str]:
    """Why files of one grid cannot be merged for another; empty if they can.

    Data ranks only need to be fewer: the rows that are cut are longer than the data dimension.
    """
    found = []
    for name in ("pp", "tp", "dp"):
        old, new = getattr(source, name), getattr(target, name)
        if new > old:
            found.append(f"{name} would grow from {old} to {new}; files are merged, not divided")
        elif name != "dp" and old % new:
            found.append(f"{name} {old} is not a multiple of {new}")
    return found


def model_files(source: Degrees, target: Degrees) -> Cells:
    """The model files of each pipeline and tensor position of a smaller grid.

    Raises:
        ValueError: If the grids do not fit, saying where.
    """
    _check(source, target)
    tall, wide = source.pp // target.pp, source.tp // target.tp
    return {
        (pp, tp): [
            old_pp * source.tp + old_tp
            for old_pp in range(pp * tall, (pp + 1) * tall)
            for old_tp in range(tp * wide, (tp + 1) * wide)
        ]
        for pp in range(target.pp)
        for tp in range(target.tp)
    }


def optimizer_files(source: Degrees, target: Degrees) -> list[Cells]:
    """The optimizer files of each position, one mapping per data rank of the smaller grid.

    Raises:
        ValueError: If the grids do not fit, saying where.
    """
    stride = source.pp * source.tp
    result: list[Cells] = [{} for _ in range(target.dp)]
    for position, cell in model_files(source, target).items():
        row = [number + dp * stride for number in cell for dp in range(source.dp)]
        for cells, part in zip(result, parts(row, target.dp, "optimizer files of a position"), strict=True):
            cells[position] = part
    return result


def groups_of(degrees: Degrees) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Ranks of the (tensor, pipeline, data) groups; tensor ranks are neighbours, then data ranks, then stages.

    Returns:
        Lists of groups in the order of their first rank.
    """
    pp, tp, dp = degrees.pp, degrees.tp, degrees.dp

    def rank(stage: int, data: int, tensor: int) -> int:
        return (stage * dp + data) * tp + tensor

    tensor_groups = [[rank(s, d, t) for t in range(tp)] for s in range(pp) for d in range(dp)]
    pipeline_groups = [[rank(s, d, t) for s in range(pp)] for d in range(dp) for t in range(tp)]
    data_groups = [[rank(s, d, t) for d in range(dp)] for s in range(pp) for t in range(tp)]
    return tensor_groups, pipeline_groups, data_groups


def _check(source: Degrees, target: Degrees) -> None:
    if found := obstacles(source, target):
        raise ValueError(f"a checkpoint of {source} cannot be read as {target}: " + "; ".join(found))
