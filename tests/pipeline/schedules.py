"""Common helpers of the tests of schedules: every schedule by name, with the numbers of chunks that it has."""

from __future__ import annotations

from collections.abc import Iterator

from zero_strategy.pipeline import SCHEDULES


def named(most_chunks: int = 4) -> Iterator[tuple[str, int]]:
    """(name, chunks) of all schedules."""
    for name, schedule in SCHEDULES.items():
        fewest, most = schedule.chunks
        for chunks in range(fewest, min(most or most_chunks, most_chunks) + 1):
            yield name, chunks
