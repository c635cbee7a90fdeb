"""GPipe, 1F1B and interleaved 1F1B: backwards in one piece."""

from __future__ import annotations

from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.rows import alternating, in_rounds, round_sizes
from zero_strategy.pipeline.tables import Table


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
        warm_up = (chunks - 1) * sizes[0] + 2 * (stages - 1 - rank)
        rows.append(tuple(alternating(forwards, backwards, warm_up)))
    return Table("interleaved_1f1b", micro_batches, Placement(stages, chunks), tuple(rows))
