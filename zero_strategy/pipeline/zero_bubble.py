"""Zero bubble schedules: backwards in halves, of which the weight halves fill what would be idle."""

from __future__ import annotations

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.rows import alternating, in_rounds, round_sizes, row_of, split
from zero_strategy.pipeline.tables import Table


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """1F1B's order and memory, with weight halves moved to where 1F1B waits at the end.

    Idle (stages - 1) / (3 x micro-batches + stages - 1) of the time if forwards and halves take equally long: a third
    of 1F1B's.
    """
    assert chunks == 1, chunks
    order = [(at, 0) for at in range(micro_batches)]
    rows = tuple(tuple(split(alternating(order, order, stages - 1 - rank), delay=rank)) for rank in range(stages))
    return Table("zb_h1", micro_batches, Placement(stages), rows)


def interleaved_zb(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """Interleaved 1F1B with backwards in halves; a rank keeps back as many weight halves as ranks are before it."""
    sizes = round_sizes(stages, micro_batches)
    forwards, backwards = in_rounds(sizes, chunks), in_rounds(sizes, chunks, backward=True)
    rows = []
    for rank in range(stages):
        warm_up = (chunks - 1) * sizes[0] + stages - 1 - rank
        actions = split(alternating(forwards, backwards, warm_up), delay=rank)
        rows.append(row_of(actions, micro_batches))
    return Table("interleaved_zb", micro_batches, Placement(stages, chunks), tuple(rows))


def zbv(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """ZB-V: two chunks, of which the second runs back up the ranks, so that the rank of the loss is the first.

    From a rank's first to its last action nothing is idle if forwards and halves take equally long and there are
    2 x stages - 1 micro-batches or more. No more activations in flight than 1F1B's largest, on every rank as many.
    """
    assert chunks == 2, chunks
    made = max(micro_batches, 2 * stages - 1)
    rows = tuple(row_of(_zbv_row(stages, rank, made), micro_batches) for rank in range(stages))
    return Table("zbv", micro_batches, Placement(stages, 2, "v"), rows)


def _zbv_row(stages: int, rank: int, micro_batches: int) -> list[Action]:
    """One rank's row, for 2 x stages - 1 micro-batches or more."""
    row: list[Action] = []
    done = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}

    def add(kind: Kind, chunk: int) -> None:
        row.append(Action(kind, done[kind, chunk], chunk))
        done[kind, chunk] += 1

    def add_whole(chunk: int) -> None:
        add(Kind.FORWARD, chunk)
        add_backward(chunk)

    def add_backward(chunk: int) -> None:
        add(Kind.BACKWARD_INPUT, chunk)
        add(Kind.BACKWARD_WEIGHT, chunk)

    for _ in range(2 * (stages - rank) - 1):  # until the first micro-batch is back up here
        add(Kind.FORWARD, 0)
    for _ in range(rank):  # until it is at the top, and its loss known
        add(Kind.FORWARD, 1)
        add(Kind.FORWARD, 0)
    for _ in range(stages - rank):
        add_whole(1)
    while done[Kind.FORWARD, 1] < micro_batches:
        if done[Kind.FORWARD, 0] < micro_batches:
            add(Kind.FORWARD, 0)
        add_backward(0)
        add_whole(1)
    for _ in range(rank):  # others wait for these
        add(Kind.BACKWARD_INPUT, 0)
        add(Kind.BACKWARD_INPUT, 1)
    for _ in range(stages - rank):
        add(Kind.BACKWARD_INPUT, 0)
        add(Kind.BACKWARD_WEIGHT, 0)
    for chunk in (1, 0):
        while done[Kind.BACKWARD_WEIGHT, chunk] < micro_batches:
            add(Kind.BACKWARD_WEIGHT, chunk)
    return row
