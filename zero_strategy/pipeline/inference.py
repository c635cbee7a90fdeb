"""Tables of forwards only, for evaluation."""

from __future__ import annotations

from zero_strategy.pipeline.actions import Action, Kind
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.rows import in_rounds, round_sizes
from zero_strategy.pipeline.tables import Row, Table


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
