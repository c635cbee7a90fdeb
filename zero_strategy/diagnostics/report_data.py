"""What the report shows, out of a recorded run: series by step, few enough points to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from zero_strategy.diagnostics.intervals import PIPELINE
from zero_strategy.diagnostics.run_files import RecordedRun
from zero_strategy.diagnostics.step_clock import PARTS
from zero_strategy.diagnostics.step_record import MemorySample, StepRecord
from zero_strategy.memory.ledger import CATEGORIES, TIERS

MOST_POINTS = 400
"""Along a chart; steps beyond that are averaged in groups."""
_WAITS = ("all_gather", "reduce_scatter", "broadcast", "control", "pipeline_bubble")
"""What a rank does that waits for another one; the rest is its own work."""
_MOST_INTERVALS = 3000
"""Of a rank in the picture of one step."""

Group = Sequence[StepRecord | None]
"""The records of steps that share a point, None where a rank has none."""


def report_data(run: RecordedRun) -> dict[str, Any]:
    """Plain types, as the page's script takes them."""
    numbers = run.numbers
    size = -(-len(numbers) // MOST_POINTS)
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    by_rank = {rank: {record.step: record for record in records} for rank, records in run.steps.items()}
    points = {rank: [[records.get(n) for n in group] for group in groups] for rank, records in by_rank.items()}
    there = {part for records in run.steps.values() for record in records for part in record.parts}
    parts = [part for part in PARTS if part in there]
    return {
        "facts": dict(run.facts),
        "directory": run.directory.name or str(run.directory),
        "steps": [group[-1] for group in groups],
        "grouped": size,
        "recorded": len(numbers),
        "ranks": list(run.steps),
        "parts": parts,
        "loss": _over_ranks(points, lambda record: record.loss),
        "seconds": {rank: _series(found, lambda record: record.seconds) for rank, found in points.items()},
        "budget": {
            rank: {part: _series(found, _part(part)) for part in parts} for rank, found in points.items()
        },
        "own": {rank: _series(found, own_work) for rank, found in points.items()},
        "tokens_per_second": _summed(points, lambda record: record.rate(record.tokens)),
        "tflops": _over_ranks(points, _tflops),
        "memory": {rank: _memory(records) for rank, records in run.steps.items()},
        "flows": _flows(run),
        "summary": _summary(run),
        "timeline": _timeline(run),
    }


def own_work(record: StepRecord) -> float:
    """Seconds in which a rank waited for no other one."""
    return record.seconds - sum(record.parts.get(part, 0.0) for part in _WAITS)


def _part(part: str) -> Callable[[StepRecord], float]:
    return lambda record: record.parts.get(part, 0.0)


def _tflops(record: StepRecord) -> float | None:
    rate = record.rate(record.operations)
    return None if rate is None else rate / 1e12


def _series(groups: Sequence[Group], value: Callable[[StepRecord], float | None]) -> list[float | None]:
    return [_mean(value(record) for record in group if record is not None) for group in groups]


def _over_ranks(
    points: dict[int, list[list[StepRecord | None]]], value: Callable[[StepRecord], float | None]
) -> list[float | None]:
    """The mean over ranks, by point."""
    return [_mean(one) for one in zip(*(_series(found, value) for found in points.values()), strict=True)]


def _summed(
    points: dict[int, list[list[StepRecord | None]]], value: Callable[[StepRecord], float | None]
) -> list[float | None]:
    """The sum over ranks, by point; None where no rank knows."""
    rows = zip(*(_series(found, value) for found in points.values()), strict=True)
    return [sum(known) if (known := [one for one in row if one is not None]) else None for row in rows]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _memory(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Samples of one rank over its steps, thinned out; bytes by tier and category."""
    every = [record for record in records if record.memory is not None]
    chosen = every[:: -(-len(every) // MOST_POINTS)] if every else []
    samples: list[MemorySample] = [record.memory for record in chosen if record.memory is not None]
    tiers: dict[str, dict[str, list[int]]] = {}
    for tier in TIERS:
        for category in CATEGORIES:
            values = [sample.tiers.get(tier, {}).get(category, 0) for sample in samples]
            if any(values):
                tiers.setdefault(tier, {})[category] = values
    return {
        "steps": [record.step for record in chosen],
        "tiers": tiers,
        "resident": [sample.resident for sample in samples],
        "allocated": [sample.allocated for sample in samples],
    }


def _flows(run: RecordedRun) -> list[dict[str, Any]]:
    """By kind: bytes and calls of a step of a rank, and the rate while something moved."""
    every = [record for records in run.steps.values() for record in records]
    found = []
    for kind in sorted({kind for record in every for kind in record.flows}):
        flows = [record.flows[kind] for record in every if kind in record.flows]
        nbytes, seconds = sum(flow.nbytes for flow in flows), sum(flow.seconds for flow in flows)
        found.append(
            {
                "kind": kind,
                "calls": sum(flow.calls for flow in flows) / len(every),
                "bytes": nbytes / len(every),
                "rate": nbytes / seconds if seconds and kind != "control" else None,  # those mostly wait for each other
            }
        )
    return found


def _summary(run: RecordedRun) -> dict[str, float | None]:
    """Medians over steps after the first, which is longer than the others."""
    steady = [record for records in run.steps.values() for record in (records[1:] or records)]
    waits = [1 - own_work(record) / record.seconds for record in steady if record.seconds > 0]
    peaks = [record.memory for records in run.steps.values() for record in records if record.memory is not None]
    tokens = [
        _median(record.rate(record.tokens) for record in (records[1:] or records)) for records in run.steps.values()
    ]
    losses = [records[-1].loss for records in run.steps.values()]
    return {
        "seconds": _median(record.seconds for record in steady),
        "tokens_per_second": sum(known) if (known := [one for one in tokens if one is not None]) else None,
        "tflops": _median(_tflops(record) for record in steady),
        "mfu": _median(record.mfu for record in steady),
        "waits": _median(waits),
        "memory": max((peak.allocated_peak or peak.resident_peak for peak in peaks), default=None),
        "loss": _mean(losses),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _timeline(run: RecordedRun) -> dict[str, Any] | None:
    """The last step that all ranks traced: intervals by rank in milliseconds from its beginning."""
    if not run.traces:
        return None
    common = set.intersection(*(set(steps) for steps in run.traces.values()))
    if not common:
        return None
    step = max(common)
    chosen = {rank: steps[step] for rank, steps in run.traces.items()}
    zero = min((one.begin for intervals in chosen.values() for one in intervals), default=0.0)
    return {
        "step": step,
        "pipeline": any(one.row == PIPELINE for intervals in chosen.values() for one in intervals),
        "left_out": max(len(intervals) - _MOST_INTERVALS for intervals in chosen.values()),
        "ranks": {
            rank: [
                [one.name, one.row, round(1e3 * (one.begin - zero), 4), round(1e3 * (one.end - zero), 4), one.detail]
                for one in sorted(intervals, key=lambda one: one.begin - one.end)[:_MOST_INTERVALS]
            ]
            for rank, intervals in chosen.items()
        },
    }
