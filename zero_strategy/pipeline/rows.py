"""What the schedules have in common: orders of micro-batches and chunks, and rows that alternate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat

from zero_strategy.pipeline.actions import Action, Kind


def round_sizes(ranks: int, micro_batches: int) -> list[int]:
    """How many micro-batches each round through the chunks has: no fewer than there are ranks, which would leave ranks
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
    return [*forwards[:warm_up], *_in_turn(chain(forwards[warm_up:], repeat(None)), backwards)]


def alternating_halves(
    forwards: Sequence[Action], inputs: Sequence[Action], weights: Sequence[Action], warm_up: int, delay: int
) -> list[Action]:
    """The same with backwards in halves; weight halves queue up, and `delay` of them stay behind until the end."""
    kept = max(0, len(weights) - delay)
    queue = chain(repeat(None, delay), weights[:kept])
    return [
        *forwards[:warm_up],
        *_in_turn(chain(forwards[warm_up:], repeat(None)), inputs, chain(queue, repeat(None))),
        *weights[kept:],
    ]


def _in_turn(*columns: Iterable[Action | None]) -> list[Action]:
    """One of each in turn, until one has no more; passes over what is None."""
    return [action for line in zip(*columns) for action in line if action is not None]
