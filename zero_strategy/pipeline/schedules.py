"""Pipeline schedules as tables: GPipe, 1F1B, interleaved, zero bubble, CSV; actions and placement.

loop, 2 ranks x 2 chunks: rank 0 has stages 0 and 2, rank 1 has 1 and 3.
v, the same: rank 0 has stages 0 and 3, rank 1 has 1 and 2; the way goes down the ranks and back up.

The zero-bubble schedules have backwards in halves, of which the weight halves fill time that would be idle.

A line per rank, in order; a cell per action: stage, letter and micro-batch, such as `2F0` for the forward of
micro-batch 0 in global stage 2. Letters are F (forward), B (backward), I and W (its input and weight halves). Empty
cells, which torch writes for idle slots, are passed over. Which stages a rank has must be a placement of ours: loop or
v.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from zero_strategy.runtime.regular_files import read_text


class Kind(str, Enum):
    """Kind of computation; the value is its letter in drawings and CSV tables."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of a backward."""
    BACKWARD_INPUT = "I"
    """The half that other stages wait for: gradients of the stage's inputs."""
    BACKWARD_WEIGHT = "W"
    """The half that nobody waits for: gradients of the stage's parameters."""


class Action(NamedTuple):
    """One computation of a rank: of this micro-batch, in the rank's stage number `chunk`."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"


Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class Placement:
    """The stages of `ranks` pipeline ranks with `chunks` stages each.

    Raises:
        ValueError: If ranks or chunks are fewer than one, the shape is unknown, or a "v" has more than two chunks.
    """

    ranks: int
    chunks: int = 1
    shape: Shape = "loop"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline needs at least one rank and one chunk, not {self.ranks} and {self.chunks}")
        if self.shape not in ("loop", "v"):
            raise ValueError(f"placement {self.shape!r} is unknown; there are 'loop' and 'v'")
        if self.shape == "v" and self.chunks != 2:
            raise ValueError(f"the 'v' placement has two chunks per rank, not {self.chunks}")

    @property
    def stages(self) -> int:
        """All global stages: ranks x chunks."""
        return self.ranks * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The global stage of a rank's chunk."""
        if self.shape == "v" and chunk == 1:
            return self.stages - 1 - rank
        return chunk * self.ranks + rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a global stage."""
        if self.shape == "v" and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def chunk_of(self, stage: int) -> int:
        """The number of a global stage among its rank's chunks."""
        return stage // self.ranks


Row = tuple[Action, ...]

_BITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 4, Kind.BACKWARD_WEIGHT: 8}
_WHOLE = (1 | 2, 1 | 4 | 8)


@dataclass(frozen=True)
class Table:
    """A row of actions for each rank. Times and messages are in no table: they follow from the order.

    Every rank carries out a forward of every micro-batch in every chunk, and a backward, or both halves of one; in a
    table for inference, forwards only.

    Raises:
        ValueError: If the rows are not those; the message names the rank and the action.
    """

    name: str
    micro_batches: int
    placement: Placement
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"schedule {self.name}: needs at least one micro-batch, not {self.micro_batches}")
        if len(self.rows) != self.ranks:
            raise ValueError(f"schedule {self.name}: {len(self.rows)} rows for {self.ranks} ranks")
        whole = (1,) if self.forward_only else _WHOLE
        first = set(self.rows[0])
        for rank, row in enumerate(self.rows):
            # By lengths as well: a set would not show an action that is there twice.
            if rank and len(row) == len(first) and set(row) == first:
                continue  # the same as rank 0 does, in another order
            seen = self._seen(rank, row)
            for place, bits in enumerate(seen):
                if bits not in whole:
                    chunk, micro_batch = divmod(place, self.micro_batches)
                    there = "".join(kind.value for kind, bit in _BITS.items() if bits & bit) or "nothing"
                    raise ValueError(
                        f"schedule {self.name}, rank {rank}: of micro-batch {micro_batch} in chunk {chunk} there is "
                        f"{there}; a forward (F) with a backward (B), or with both halves of one (I and W), is needed"
                    )

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks, and so of rows."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return self.placement.chunks

    @property
    def forward_only(self) -> bool:
        """True if this is a table for inference."""
        return all(action.kind is Kind.FORWARD for row in self.rows for action in row)

    def _seen(self, rank: int, row: Row) -> list[int]:
        """For each chunk and micro-batch, the bits of what the row does with it."""
        micro_batches, chunks = self.micro_batches, self.chunks
        seen = [0] * (micro_batches * chunks)
        for kind, micro_batch, chunk in row:
            if not (0 <= micro_batch < micro_batches and 0 <= chunk < chunks):
                there = f"there are {micro_batches} micro-batches and {chunks} chunks"
                raise ValueError(f"{self._where(rank, Action(kind, micro_batch, chunk))}, but {there}")
            place, bit = chunk * micro_batches + micro_batch, _BITS[kind]
            if seen[place] & bit:
                raise ValueError(f"{self._where(rank, Action(kind, micro_batch, chunk))} twice")
            seen[place] |= bit
        return seen

    def _where(self, rank: int, action: Action) -> str:
        what = f"{action.kind.value} of micro-batch {action.micro_batch} in chunk {action.chunk}"
        return f"schedule {self.name}, rank {rank}: {what}"


def round_sizes(ranks: int, micro_batches: int) -> list[int]:
    """Number of micro-batches in each round through the chunks: no fewer than there are ranks, which would leave ranks
    idle, and otherwise as few and as equal as can be, the larger ones first. Fewer than ranks are one round."""
    rounds = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, rounds)
    return [size + 1] * larger + [size] * (rounds - larger)


def in_rounds(kind: Kind, sizes: Sequence[int], chunks: int) -> list[Action]:
    """A rank's actions of a kind: rounds of so many micro-batches, each through all chunks; for backwards the last
    chunk comes first."""
    way = range(chunks) if kind is Kind.FORWARD else range(chunks - 1, -1, -1)
    rounds = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes))]
    return [Action(kind, at, chunk) for one in rounds for chunk in way for at in one]


def alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    # Forwards run out first, by as many as came before; the backwards decide on the end.
    return [*forwards[:warm_up], *_in_turn(chain(forwards[warm_up:], repeat(None)), backwards)]


def alternating_halves(
    forwards: Sequence[Action], inputs: Sequence[Action], weights: Sequence[Action], warm_up: int, delay: int
) -> list[Action]:
    """Alternate, with backwards in halves: weight halves queue up, and `delay` of them stay behind until the end."""
    kept = max(0, len(weights) - delay)
    queue = chain(repeat(None, delay), weights[:kept])  # the column of weight halves lags behind by so many
    return [
        *forwards[:warm_up],
        *_in_turn(chain(forwards[warm_up:], repeat(None)), inputs, chain(queue, repeat(None))),
        *weights[kept:],
    ]


def _in_turn(*columns: Iterable[Action | None]) -> list[Action]:
    """One of each in turn, until one has no more; passes over what is None."""
    return [action for line in zip(*columns) for action in line if action is not None]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """All forwards, then all backwards; with several chunks one chunk after the other.

    Idle (stages - 1) / (chunks x micro-batches + stages - 1) of the time, if there are no fewer micro-batches than
    stages. All micro-batches are in flight at once.
    """
    forwards, backwards = (in_rounds(kind, [micro_batches], chunks) for kind in (Kind.FORWARD, Kind.BACKWARD))
    return Table("gpipe", micro_batches, Placement(stages, chunks), (tuple(forwards + backwards),) * stages)


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """1F1B: as many forwards as it takes until the first backward arrives, then one backward for each forward.

    Idle (stages - 1) / (micro-batches + stages - 1) of the time; min(stages - s, micro-batches) in flight in stage s.
    """
    assert chunks == 1, chunks
    forwards, backwards = (in_rounds(kind, [micro_batches], 1) for kind in (Kind.FORWARD, Kind.BACKWARD))
    rows = tuple(tuple(alternating(forwards, backwards, stages - 1 - rank)) for rank in range(stages))
    return Table("1f1b", micro_batches, Placement(stages), rows)


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """Interleaved 1F1B: micro-batches go in rounds through a rank's chunks, 1F1B in between.

    Idle (stages - 1) / (chunks x micro-batches + stages - 1) of the time, if there are no fewer micro-batches than
    stages; more activations in flight than 1F1B, and `chunks` times the messages.
    """
    sizes = round_sizes(stages, micro_batches)
    forwards, backwards = (in_rounds(kind, sizes, chunks) for kind in (Kind.FORWARD, Kind.BACKWARD))
    rows = []
    for rank in range(stages):
        # The first micro-batch comes to the last chunk, goes on to the last rank, and its gradient comes back.
        warm_up = (chunks - 1) * sizes[0] + 2 * (stages - 1 - rank)
        rows.append(tuple(alternating(forwards, backwards, warm_up)))
    return Table("interleaved_1f1b", micro_batches, Placement(stages, chunks), tuple(rows))


_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """1F1B's order and memory, with weight halves moved to where 1F1B waits at the end.

    Idle (stages - 1) / (3 x micro-batches + stages - 1) of the time if forwards and halves take equally long: a third
    of 1F1B's.
    """
    assert chunks == 1, chunks
    forwards, inputs, weights = (in_rounds(kind, [micro_batches], 1) for kind in _KINDS)
    rows = []
    for rank in range(stages):
        # The last input half of rank r ends r units before that of rank 0: as many weight halves fill that time.
        rows.append(tuple(alternating_halves(forwards, inputs, weights, stages - 1 - rank, delay=rank)))
    return Table("zb_h1", micro_batches, Placement(stages), tuple(rows))


def interleaved_zb(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """Interleaved 1F1B with backwards in halves; a rank keeps back as many weight halves as ranks are before it."""
    sizes = round_sizes(stages, micro_batches)
    forwards, inputs, weights = (in_rounds(kind, sizes, chunks) for kind in _KINDS)
    rows = []
    for rank in range(stages):
        # One forward for each rank further on, not two as for whole backwards: an input half comes back sooner,
        # and fewer activations are held.
        warm_up = (chunks - 1) * sizes[0] + stages - 1 - rank
        rows.append(tuple(alternating_halves(forwards, inputs, weights, warm_up, delay=rank)))
    return Table("interleaved_zb", micro_batches, Placement(stages, chunks), tuple(rows))


def zbv(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """ZB-V: two chunks, of which the second runs back up the ranks, so that the rank of the loss is the first.

    From a rank's first to its last action nothing is idle if forwards and halves take equally long and there are
    2 x stages - 1 micro-batches or more. No more activations in flight than 1F1B's largest, on every rank as many.
    """
    assert chunks == 2, chunks
    # Micro-batches do not depend on each other: what remains of a row without some of them can still be carried out.
    made = max(micro_batches, 2 * stages - 1)
    actions = {(kind, chunk): [Action(kind, at, chunk) for at in range(made)] for kind in _KINDS for chunk in (0, 1)}
    rows = []
    for rank in range(stages):
        rows.append(tuple([action for action in _zbv_row(stages, rank, actions) if action[1] < micro_batches]))
    return Table("zbv", micro_batches, Placement(stages, 2, "v"), tuple(rows))


def _zbv_row(stages: int, rank: int, actions: Mapping[tuple[Kind, int], Sequence[Action]]) -> list[Action]:
    """One rank's row: all these actions, each kind and chunk by micro-batch, of which there are 2 x stages - 1 or
    more."""
    row: list[Action] = []
    left = {key: iter(own) for key, own in actions.items()}

    def add(*keys: tuple[Kind, int]) -> None:
        for key in keys:
            row.extend(islice(left[key], 1))  # nothing more where these have come to their end

    forwards, inputs, weights = ([(kind, chunk) for chunk in (0, 1)] for kind in _KINDS)
    for _ in range(2 * (stages - rank) - 1):  # until the first micro-batch is back up here
        add(forwards[0])
    for _ in range(rank):  # until it is at the top, and its loss known
        add(forwards[1], forwards[0])
    for _ in range(stages - rank):
        add(forwards[1], inputs[1], weights[1])
    for _ in range(len(actions[forwards[1]]) - stages):  # first chunks' forwards end before these do
        add(forwards[0], inputs[0], weights[0], forwards[1], inputs[1], weights[1])
    for _ in range(rank):  # others wait for these
        add(inputs[0], inputs[1])
    for _ in range(stages - rank):
        add(inputs[0], weights[0])
    # Nobody waits for these: they fill the time in which other ranks still have input halves.
    return [*row, *left[weights[1]], *left[weights[0]]]


def inference(placement: Placement, micro_batches: int) -> Table:
    """Forwards of all micro-batches, for stages that are placed as the training schedule wants them.

    In a loop this takes as long as chunks x micro-batches + ranks - 1 forwards, if there are no fewer micro-batches
    than ranks; in a v it is chunks x micro-batches + 2 x (ranks - 1).

    Raises:
        ValueError: If there are no micro-batches.
    """
    rows = tuple(_row(placement, rank, micro_batches) for rank in range(placement.ranks))
    return Table("inference", micro_batches, placement, rows)


def _row(placement: Placement, rank: int, micro_batches: int) -> Row:
    ranks = placement.ranks
    if placement.shape == "loop":
        return tuple(in_rounds(Kind.FORWARD, round_sizes(ranks, micro_batches), placement.chunks))
    # A micro-batch comes back up after 2 x (ranks - rank) - 1 units; from then on both ways take turns.
    ahead = 2 * (ranks - rank) - 1
    down = [Action(Kind.FORWARD, at, 0) for at in range(micro_batches + ahead)]
    up = [Action(Kind.FORWARD, at - ahead, 1) for at in range(micro_batches + ahead)]
    order_of_both = [action for pair in zip(up, down, strict=True) for action in pair]
    return tuple(action for action in order_of_both if 0 <= action.micro_batch < micro_batches)


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def read_csv(path: str | Path) -> Table:
    """The table in a file.

    Raises:
        ValueError: If a cell is no action, or the cells are no whole schedule of a placement of ours.
        OSError: If the file cannot be read.
    """
    text = io.StringIO(read_text(path), newline="")  # `csv` reads line ends itself
    lines = [[cell.strip() for cell in line if cell.strip()] for line in csv.reader(text)]
    # Empty lines at the end are no ranks; before that, a rank without actions is an error.
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
    with Path(path).open("w", newline="", encoding="utf-8") as file:  # `csv` writes line ends itself
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
        if shape == "v" and chunks != 2:  # `Placement` refuses such a v
            continue
        placement = Placement(ranks, chunks, shape)
        if all(stages[rank] == {placement.stage_of(rank, c) for c in range(chunks)} for rank in range(ranks)):
            return placement
    there = ", ".join(f"rank {rank}: {sorted(own)}" for rank, own in enumerate(stages))
    raise ValueError(
        f"{path}: the stages of the ranks ({there}) are neither in a loop (rank r has r, r + {ranks}, ...) nor in a v "
        f"(rank r has r and {2 * ranks - 1} - r)"
    )


_CSV = "csv:"


@dataclass(frozen=True)
class Schedule:
    """Builder of a schedule, and the numbers of chunks per rank that it takes."""

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
    """Placement of a schedule's stages; see `build_table`."""
    if name.startswith(_CSV):
        table = read_csv(name.removeprefix(_CSV))
        # No run is known yet, whose number of micro-batches the file would have to have.
        return _from_file(name, stages, table.micro_batches, chunks).placement
    return build_table(name, stages, stages, chunks).placement  # any number of micro-batches: it decides on no place


def _from_file(name: str, stages: int, micro_batches: int, chunks: int | None) -> Table:
    table = read_csv(name.removeprefix(_CSV))
    wanted = {"stages": stages, "micro_batches": micro_batches, "chunks": table.chunks if chunks is None else chunks}
    there = {"stages": table.ranks, "micro_batches": table.micro_batches, "chunks": table.chunks}
    for what, number in wanted.items():
        if number != there[what]:
            raise ValueError(f"schedule {name}: the file is for {what} = {there[what]}, but the run has {number}")
    return table
