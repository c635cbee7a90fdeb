"""Tables as CSV files, in torch.distributed.pipelining's compute-only format.

A line per rank, in order; a cell per action: stage, letter and micro-batch, such as `2F0` for the forward of
micro-batch 0 in global stage 2. Letters are F (forward), B (backward), I and W (its input and weight halves). Empty
cells, which torch writes for idle slots, are passed over. Which stages a rank has must be a placement of ours: loop or
v.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import get_args

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.placement import Placement, Shape
from zero_strategy.pipeline.tables import Table

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def read_csv(path: str | Path) -> Table:
    """The table in a file.

    Raises:
        ValueError: If a cell is no action, or the cells are no whole schedule of a placement of ours.
        OSError: If the file cannot be read.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        lines = [[cell.strip() for cell in line if cell.strip()] for line in csv.reader(file)]
    while lines and not lines[-1]:
        lines.pop()
    cells = [[_parse(path, rank, cell) for cell in line] for rank, line in enumerate(lines)]
    for rank, line in enumerate(cells):
        if not line:
            raise ValueError(f"{path}: line {rank + 1} has no actions, but others after it have")
    if not cells:
        raise ValueError(f"{path}: there are no actions in this file")
    placement = _placement(path, [{stage for stage, _, _ in line} for line in cells])
    micro_batches = 1 + max(micro_batch for line in cells for _, _, micro_batch in line)
    rows = tuple(tuple(Action(kind, at, placement.chunk_of(stage)) for stage, kind, at in line) for line in cells)
    return Table(f"csv:{path}", micro_batches, placement, rows)


def write_csv(table: Table, path: str | Path) -> None:
    """Write a table so that `read_csv` and torch read it.

    Raises:
        OSError: If the file cannot be written.
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for rank, row in enumerate(table.rows):
            writer.writerow(f"{table.placement.stage_of(rank, a.chunk)}{a.kind.value}{a.micro_batch}" for a in row)


def _parse(path: str | Path, rank: int, cell: str) -> tuple[int, Kind, int]:
    found = _CELL.fullmatch(cell)
    if found is None:
        raise ValueError(
            f"{path}, line {rank + 1}: {cell!r} is no action; one is stage, letter (F, B, I or W) and micro-batch, "
            "such as 2F0 (sends and receives are not written: they follow from the order)"
        )
    return int(found[1]), Kind(found[2]), int(found[3])


def _placement(path: str | Path, stages: list[set[int]]) -> Placement:
    """The placement in which the ranks have these stages."""
    ranks, chunks = len(stages), len(stages[0])
    for shape in get_args(Shape):
        if shape == "v" and chunks != 2:
            continue
        placement = Placement(ranks, chunks, shape)
        if all(stages[rank] == {placement.stage_of(rank, c) for c in range(chunks)} for rank in range(ranks)):
            return placement
    there = ", ".join(f"rank {rank}: {sorted(own)}" for rank, own in enumerate(stages))
    raise ValueError(
        f"{path}: the stages of the ranks ({there}) are neither in a loop (rank r has r, r + {ranks}, ...) nor in a v "
        f"(rank r has r and {2 * ranks - 1} - r)"
    )
