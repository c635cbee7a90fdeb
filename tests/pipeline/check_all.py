"""``python -m tests.pipeline.check_all``: every schedule, all stages <= 16 x micro-batches <= 64 x chunks <= 4.

Ends with how many there were and how long that took; a schedule that fails is an error that names it.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.pipeline.schedules import named
from zero_strategy.pipeline import InferenceSchedule, TrainSchedule, build_table, lower
from zero_strategy.pipeline.check import check

STAGES, MICRO_BATCHES, CHUNKS = 16, 64, 4


def check_one(name: str, stages: int, micro_batches: int, chunks: int) -> int:
    """Check a schedule; returns how many instructions it has on all ranks."""
    schedules = lower(build_table(name, stages, micro_batches, chunks))
    try:
        check(schedules)
    except ValueError as error:
        raise AssertionError(f"{name}, {stages} stages, {micro_batches} micro-batches, {chunks} chunks") from error
    return sum(len(schedule.ops) for schedule in schedules)


def check_row(stages: int, micro_batches: int) -> tuple[int, int]:
    """All schedules for these numbers; returns how many, and their instructions."""
    found = [check_one(name, stages, micro_batches, chunks) for name, chunks in named(CHUNKS)]
    for deepspeeds in (TrainSchedule, InferenceSchedule):
        check([deepspeeds(micro_batches, stages, stage) for stage in range(stages)])
    return len(found) + 2, sum(found)


def rows() -> Iterator[tuple[int, int]]:
    """Large ones first, so that processes end together."""
    for stages in range(STAGES, 0, -1):
        for micro_batches in range(MICRO_BATCHES, 0, -1):
            yield stages, micro_batches


def main() -> int:
    began = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(check_row, *zip(*rows()), chunksize=4))
    schedules, instructions = map(sum, zip(*found))
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = f"{used.ru_utime + used.ru_stime:.1f} s of CPU time"
    print(f"{schedules} schedules, {instructions / 1e6:.1f} million instructions: all pass, in {seconds:.1f} s ({cpu})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
