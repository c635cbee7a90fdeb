"""A recorded run as a Chrome trace, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_strategy.diagnostics.intervals import PHASES, PIPELINE, TRAINING
from zero_strategy.diagnostics.run_files import Interval, RecordedRun

_NESTED = (PHASES, TRAINING, PIPELINE)
"""Rows of one thread: what is in them nests. In others transfers overlap as they like."""


def chrome_trace(run: RecordedRun) -> dict[str, Any]:
    """The traced steps: a process for each rank, a thread for each row, times in microseconds from the first on.

    Raises:
        ValueError: If no step was traced.
    """
    found = [one for steps in run.traces.values() for intervals in steps.values() for one in intervals]
    if not found:
        raise ValueError(
            f"{run.directory} holds no traced step (trace-RANK.jsonl): set diagnostics.trace_steps to more than 0"
        )
    zero = min(one.begin for one in found)
    events: list[dict[str, Any]] = []
    for rank, steps in run.traces.items():
        events.append(_named("process_name", f"rank {rank}", rank, 0))
        rows = _rows([one for intervals in steps.values() for one in intervals])
        events.extend(_named("thread_name", row, rank, number) for row, number in rows.items())
        number = 0
        for step, intervals in steps.items():
            for one in intervals:
                number += 1
                events.extend(_events(one, step, rank, rows[one.row], number, zero))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(intervals: list[Interval]) -> dict[str, int]:
    """Thread numbers by row, those of the thread that trains first."""
    there = {one.row for one in intervals}
    ordered = [row for row in _NESTED if row in there] + sorted(there.difference(_NESTED))
    return {row: number for number, row in enumerate(ordered, start=1)}


def _events(one: Interval, step: int, rank: int, row: int, number: int, zero: float) -> Iterator[dict[str, Any]]:
    begin, end = 1e6 * (one.begin - zero), 1e6 * (one.end - zero)
    common = {"name": one.name, "cat": one.row, "pid": rank, "tid": row}
    details = {"step": step, **({"detail": one.detail} if one.detail else {})}
    if one.row in _NESTED:
        yield {**common, "ph": "X", "ts": begin, "dur": end - begin, "args": details}
    else:
        yield {**common, "ph": "b", "id": f"{rank}.{number}", "ts": begin, "args": details}
        yield {**common, "ph": "e", "id": f"{rank}.{number}", "ts": end}


def _named(what: str, name: str, rank: int, row: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": name}}
