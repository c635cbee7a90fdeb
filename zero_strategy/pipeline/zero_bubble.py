"""Zero bubble schedules: backwards in halves, of which the weight halves fill what would be idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.rows import alternating_halves, in_rounds, round_sizes
from zero_strategy.pipeline.tables import Table

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
        rows.append(tuple(alternating_halves(forwards, inputs, weights, stages - 1 - rank, delay=rank)))
    return Table("zb_h1", micro_batches, Placement(stages), tuple(rows))


def interleaved_zb(stages: int, micro_batches: int, chunks: int = 2) -> Table:
    """Interleaved 1F1B with backwards in halves; a rank keeps back as many weight halves as ranks are before it."""
    sizes = round_sizes(stages, micro_batches)
    forwards, inputs, weights = (in_rounds(kind, sizes, chunks) for kind in _KINDS)
    rows = []
    for rank in range(stages):
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
            row.extend(islice(left[key], 1))

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
    return [*row, *left[weights[1]], *left[weights[0]]]
