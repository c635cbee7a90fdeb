"""What the schedules have in common: orders of micro-batches and chunks, and rows that alternate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.tables import Row

Order = Sequence[tuple[int, int]]
"""(micro-batch, chunk), in the order in which a rank computes them."""


def round_sizes(ranks: int, micro_batches: int) -> list[int]:
    """How many micro-batches each round through the chunks has: no fewer than there are ranks, which would leave ranks
    idle, and otherwise as few and as equal as can be, the larger ones first.

    Of fewer micro-batches than ranks a round for all ranks is made, see `row_of`.
    """
    rounds = max(1, micro_batches // ranks)
    size, larger = divmod(max(micro_batches, ranks), rounds)
    return [size + 1] * larger + [size] * (rounds - larger)


def in_rounds(sizes: Sequence[int], chunks: int, *, backward: bool = False) -> Order:
    """Rounds of so many micro-batches, each through all chunks; for backwards the last chunk comes first."""
    way = range(chunks - 1, -1, -1) if backward else range(chunks)
    starts = accumulate(sizes, initial=0)
    return [(start + at, chunk) for start, size in zip(starts, sizes) for chunk in way for at in range(size)]


def alternating(forwards: Order, backwards: Order, warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(warm_up, len(forwards))
    actions = [Action(Kind.FORWARD, *one) for one in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards):
        actions += (Action(Kind.FORWARD, *forward), Action(Kind.BACKWARD, *backward))
    return actions + [Action(Kind.BACKWARD, *one) for one in backwards[len(forwards) - ahead :]]


def split(actions: Iterable[Action], delay: int) -> list[Action]:
    """The same with backwards in halves; weight halves queue up, and `delay` of them stay behind until the end."""
    result: list[Action] = []
    queue: list[Action] = []
    for kind, micro_batch, chunk in actions:
        if kind is not Kind.BACKWARD:
            result.append(Action(kind, micro_batch, chunk))
            continue
        result.append(Action(Kind.BACKWARD_INPUT, micro_batch, chunk))
        queue.append(Action(Kind.BACKWARD_WEIGHT, micro_batch, chunk))
        if len(queue) > delay:
            result.append(queue.pop(0))
    return result + queue


def row_of(actions: Iterable[Action], micro_batches: int) -> Row:
    """The actions whose micro-batches exist.

    What can be carried out can be carried out without some of its micro-batches, since they do not depend on each
    other. So schedules are made for the numbers that suit them, and serve all others.
    """
    return tuple(action for action in actions if action[1] < micro_batches)
