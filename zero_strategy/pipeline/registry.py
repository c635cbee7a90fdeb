"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zero_strategy.pipeline.classic import gpipe, interleaved, one_forward_one_backward
from zero_strategy.pipeline.csv_tables import read_csv
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.tables import Table
from zero_strategy.pipeline.zero_bubble import interleaved_zb, zb_h1, zbv

_CSV = "csv:"


@dataclass(frozen=True)
class Schedule:
    """How a schedule is made, and with how many chunks per rank it can be."""

    make: Callable[[int, int, int], Table]
    chunks: tuple[int, int | None]
    """The fewest, which is the default, and the most; None: any number."""
    otherwise: str
    """What to take for other numbers of chunks."""
    idle: str
    """The fraction of the time in which a rank has nothing to do: p stages, m micro-batches, v chunks."""
    in_flight: str
    """Micro-batches whose activations rank s holds at most; a chunk's count as 1/v."""


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": Schedule(gpipe, (1, None), "", "(p-1)/(vm+p-1)", "m"),
        "1f1b": Schedule(one_forward_one_backward, (1, 1), "interleaved_1f1b", "(p-1)/(m+p-1)", "min(p-s, m)"),
        "interleaved_1f1b": Schedule(interleaved, (2, None), "1f1b", "(p-1)/(vm+p-1)", "min(p + (p-1-2s)/v, m)"),
        "zb_h1": Schedule(zb_h1, (1, 1), "interleaved_zb", "(p-1)/(3m+p-1)", "min(p, m)"),
        "interleaved_zb": Schedule(interleaved_zb, (2, None), "zb_h1", "(p-1)/(3vm+p-1)", "min(p, m)"),
        "zbv": Schedule(zbv, (2, 2), "interleaved_zb", "0 from a rank's first to its last action", "min(p, m)"),
    }
)


def build_table(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Table:
    """The table of a schedule.

    Args:
        name: One of SCHEDULES, or `csv:PATH` for one in a file.
        stages: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.
        chunks: Stages of each rank; None: the fewest that the schedule has, or what the file has.

    Raises:
        ValueError: If there is no such schedule, or not with these numbers.
        OSError: If the file cannot be read.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"schedule {name}: {stages} stages and {micro_batches} micro-batches; at least one of each")
    if name.startswith(_CSV):
        return _from_file(name, stages, micro_batches, chunks)
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; there are {', '.join(SCHEDULES)}, and {_CSV}PATH")
    schedule = SCHEDULES[name]
    fewest, most = schedule.chunks
    count = fewest if chunks is None else chunks
    if count < fewest or (most is not None and count > most):
        numbers = f"{fewest} or more chunks" if most is None else f"{most} chunk{'s' * (most > 1)}"
        instead = f"; {schedule.otherwise} is for {count}" if schedule.otherwise and count > 0 else ""
        raise ValueError(f"schedule {name} has {numbers} per rank, not {count}{instead}")
    return schedule.make(stages, micro_batches, count)


def placement_of(name: str, stages: int, chunks: int | None = None) -> Placement:
    """Where a schedule has its stages; see `build_table`."""
    if name.startswith(_CSV):
        table = read_csv(name.removeprefix(_CSV))
        return _from_file(name, stages, table.micro_batches, chunks).placement
    return build_table(name, stages, stages, chunks).placement


def _from_file(name: str, stages: int, micro_batches: int, chunks: int | None) -> Table:
    table = read_csv(name.removeprefix(_CSV))
    wanted = {"stages": stages, "micro_batches": micro_batches, "chunks": table.chunks if chunks is None else chunks}
    there = {"stages": table.ranks, "micro_batches": table.micro_batches, "chunks": table.chunks}
    for what, number in wanted.items():
        if number != there[what]:
            raise ValueError(f"schedule {name}: the file is for {what} = {there[what]}, but the run has {number}")
    return table
