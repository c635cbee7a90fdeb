"""`zero-strategy report` and `zero-strategy trace`: a recorded run as one HTML page, or as a Chrome trace.

The page holds series by step, few enough points to draw; it needs no network and no other file.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zero_strategy.diagnostics.recorder import PHASES, PIPELINE, TRAINING
from zero_strategy.diagnostics.run_files import Interval, MemorySample, RecordedRun, StepRecord, read_run
from zero_strategy.diagnostics.step_clock import PARTS
from zero_strategy.planning.ledger import CATEGORIES, TIERS
from zero_strategy.runtime.shown import shown
from zero_strategy.runtime.terminal import complain, size

MOST_POINTS = 400
"""Along a chart; steps beyond that are averaged in groups."""
_WAITS = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "control", "pipeline_bubble")
"""What a rank does that waits for another one; the rest is its own work."""
_MOST_INTERVALS = 3000
"""Of a rank in the picture of one step."""

Group = Sequence[StepRecord | None]
"""The records of steps that share a point, None where a rank has none."""


def report_data(run: RecordedRun) -> dict[str, Any]:
    """Plain types, as the page's script takes them."""
    numbers = run.numbers
    grouped = -(-len(numbers) // MOST_POINTS)
    groups = [numbers[start : start + grouped] for start in range(0, len(numbers), grouped)]
    by_rank = {rank: {record.step: record for record in records} for rank, records in run.steps.items()}
    points = {rank: [[records.get(n) for n in group] for group in groups] for rank, records in by_rank.items()}
    there = {part for records in run.steps.values() for record in records for part in record.parts}
    parts = [part for part in PARTS if part in there]
    return {
        "facts": dict(run.facts),
        "directory": run.directory.name or str(run.directory),
        "steps": [group[-1] for group in groups],
        "grouped": grouped,
        "recorded": len(numbers),
        "ranks": list(run.steps),
        "parts": parts,
        "loss": _over_ranks(points, lambda record: record.loss),
        "seconds": {rank: _series(found, lambda record: record.seconds) for rank, found in points.items()},
        "budget": {rank: {part: _series(found, _part(part)) for part in parts} for rank, found in points.items()},
        "own": {rank: _series(found, own_work) for rank, found in points.items()},
        "tokens_per_second": _summed(points, lambda record: record.rate(record.tokens)),
        "tflops": _over_ranks(points, _tflops),
        "memory": {rank: _memory(records) for rank, records in run.steps.items()},
        "flows": _flows(run),
        "experts": _experts(run),
        "deaths": _deaths(run),
        "chosen": _chosen(run),
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
    """Bytes and calls of a rank's step, and the rate while something moved, by kind."""
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


def _experts(run: RecordedRun) -> list[dict[str, Any]]:
    """Layers of divided experts: rows for each expert over all recorded steps and ranks."""
    found: dict[str, list[int]] = {}
    for record in (record for records in run.steps.values() for record in records):
        for name, rows in (record.experts or {}).items():
            known = found.setdefault(name, [0] * len(rows))
            found[name] = [one + other for one, other in zip(known, rows, strict=True)]
    return [{"layer": name, "rows": rows} for name, rows in found.items()]


def _chosen(run: RecordedRun) -> dict[str, Any] | None:
    """Candidates among which settings were chosen, and how near the prediction was; None: nobody has chosen."""
    found = run.facts.get("chosen")
    if not found:
        return None
    predicted, measured = found["candidates"][0]["seconds"]["total"], _summary(run)["seconds"]
    said = f"Chosen: {found['candidates'][0]['said']}, predicted to take {predicted:.3g} s a step"
    said += f" (measured: {measured:.3g} s)" if measured else ""
    if (foreseen := found["candidates"][0].get("foreseen")) is not None:
        said += f" and {size(foreseen)} of a rank"
        said += f" (measured: {size(nbytes)})" if (nbytes := _measured_bytes(run, found)) is not None else ""
    rows = [
        {
            "said": each["said"],
            "batch": f"{each['rows'] or '?'} x {each['accumulation']}",
            "bytes": {tier: total["taken"] for tier, total in each["ledger"]["tiers"].items()},
            "activations": each["activations"],
            "seconds": each["seconds"]["total"],
            "why": each["why"] or "chosen",
        }
        for each in found["candidates"]
    ]
    left = f"; {found['left out']} more candidates are left out" if found["left out"] else ""
    said += f". Activations: {found['activations']}; {found['margin']:.0%} of the memory stays free{left}."
    return {"said": said, "rows": rows}


def _measured_bytes(run: RecordedRun, chosen: Mapping[str, Any]) -> int | None:
    """Bytes of the first rank beyond those that it had without its model when settings were chosen; None: not known."""
    samples = [record.memory for record in run.steps.get(0, ()) if record.memory is not None]
    if not samples:
        return None
    if samples[-1].allocated_peak is not None:
        return max(sample.allocated_peak or 0 for sample in samples)
    most = max(sample.resident_peak for sample in samples)
    # No more than before the training: then nobody knows how much of it the training took.
    return most - int(chosen["resident"]) if most > chosen.get("resident peak", most) else None


def _deaths(run: RecordedRun) -> dict[str, Any] | None:
    """Beginnings after the first one, and what they come to in words; None of a run that does not survive deaths."""
    if not run.beginnings:
        return None
    later = [one for one in run.beginnings if not one.first]
    count, stalls = sum(len(one.went) for one in later), [one.stall for one in later if one.stall is not None]
    share = goodput(run)
    said = "No process died" if not count else f"{count} process{'es' if count > 1 else ''} died"
    if stalls:
        said += (
            f", and the training began anew {len(later)} time{'s' if len(later) > 1 else ''}; the median stall took "
            f"{median(stalls):.3g} s, the largest {max(stalls):.3g} s"
        )
    return {
        "count": count,
        "goodput": share,
        "said": f"{said}; steps that counted were done in {100 * share:.3g} % of the time (goodput).",
        "rows": [one.to_json() for one in later],
    }


def goodput(run: RecordedRun) -> float:
    """The share of the time since the first copy in which steps were done that counted; see `History.goodput`.

    Time ends with the last recorded step. Of a directory in which several runs have recorded the times are added up;
    what lies between two runs counts for neither.
    """
    ends = sorted(record.time for records in run.steps.values() for record in records)
    total, lost = 0.0, sum(one.lost for one in run.beginnings)
    firsts = [one for one in run.beginnings if one.first]
    for first, following in zip(firsts, [*firsts[1:], None]):
        own = [
            one.since + one.lost
            for one in run.beginnings
            if one.time >= first.time and (following is None or one.time < following.time)
        ]
        own += [end for end in ends if end >= first.since and (following is None or end < following.time)]
        total += max(own) - first.since
    return max(0.0, 1.0 - lost / total) if total > 0.0 else 1.0


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


def report_page(run: RecordedRun) -> str:
    """The page's text."""
    parts = files("zero_strategy.cli") / "page"
    page, style, script = ((parts / name).read_text("utf-8") for name in ("report.html", "report.css", "report.js"))
    data = json.dumps(report_data(run), separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    title = html.escape(f"{run.facts.get('model', {}).get('class', 'Run')}: {run.directory.name}")
    for place, text in (("@TITLE@", title), ("@STYLE@", style), ("@SCRIPT@", script), ("@DATA@", data)):
        page = page.replace(place, text, 1)
    return page


def write_report(run: RecordedRun, path: Path) -> None:
    """Write the page.

    Raises:
        OSError: If that is not possible.
    """
    path.write_text(report_page(run), encoding="utf-8")


_REPORT = """\
Writes what ranks recorded (diagnostics.run_dir) as one HTML page: loss, where the time of steps goes, memory by
category and rank, what moves and how fast, how far ranks are apart, the timeline of a step. It needs no network."""
_TRACE = """\
Writes the steps whose intervals were kept (diagnostics.trace_steps) as a Chrome trace, for ui.perfetto.dev or
chrome://tracing: a process for each rank, with what its training thread does, its transfers and its pipeline."""
_EXIT = "Exit status: 0; 2 if there is nothing recorded, or a file cannot be read or written."


def add_report_commands(commands: Any) -> None:
    """Adds both to the parser's."""
    for name, what, text, suffix in (
        ("report", "a recorded run as an HTML page", _REPORT, "report.html"),
        ("trace", "traced steps of a recorded run for Perfetto", _TRACE, "trace.json"),
    ):
        parser = commands.add_parser(
            name,
            help=what,
            description=f"{text}\n\n{_EXIT}",
            epilog=f"examples:\n  zero-strategy {name} runs/today\n  zero-strategy {name} runs/today --output {suffix}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="what diagnostics.run_dir named")
        parser.add_argument("--output", metavar="FILE", type=Path, help=f"default: RUN_DIR/{suffix}")
        parser.set_defaults(default_output=suffix)


def run_report_command(options: argparse.Namespace) -> int:
    """Run either; returns the exit status."""
    path = options.output or options.directory / options.default_output
    try:
        run = read_run(options.directory)
        if options.command == "report":
            write_report(run, path)
            what = f"{len(run.numbers)} steps of {len(run.steps)} rank(s)"
        else:
            trace = chrome_trace(run)
            path.write_text(json.dumps(trace), encoding="utf-8")
            what = (
                f"{len(trace['traceEvents'])} events of {len(run.traces)} rank(s); open it in https://ui.perfetto.dev"
            )
    except (ValueError, OSError) as error:
        complain(f"zero-strategy {options.command}: {error}")
        return 2
    print(f"{shown(path)}: {what}")
    return 0
