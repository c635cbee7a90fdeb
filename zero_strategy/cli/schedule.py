"""`zero-strategy schedule`: lists and draws pipeline schedules and measured timelines, as text or pictures."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_strategy.cli.figures import figure, style, theme
from zero_strategy.pipeline.check import check
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.schedules import SCHEDULES, Kind, build_table, write_csv
from zero_strategy.pipeline.simulator import (
    Event,
    Timeline,
    Times,
    read_timeline,
    simulate,
    write_timeline,
)
from zero_strategy.runtime.terminal import complain
from zero_strategy.runtime.terminal import table as as_table

_SHOW = """\
Draws who computes what when: of a schedule, by simulation, or of a step of a run, from the timeline that it wrote.
Letters are F (forward), B (backward), I and W (its halves: gradients of inputs, of weights) with the micro-batch, and
with several chunks per rank a letter for the chunk; dots are idle.

Exit status: 0; 2 if there is no such schedule, or a file cannot be read or written."""

_EXAMPLES = """\
examples:
  zero-strategy schedule list
  zero-strategy schedule show --schedule zbv --stages 4 --micro-batches 8
  zero-strategy schedule show --schedule 1f1b --stages 4 --micro-batches 8 --forward 1 --backward 1.2 --weight 0.9
  zero-strategy schedule show --schedule interleaved_1f1b --chunks 2 --stages 4 --micro-batches 8 --output schedule.svg
  zero-strategy schedule show --schedule csv:mine.csv --stages 4 --micro-batches 8
  zero-strategy schedule show --timeline timeline.jsonl --step 20 --output measured.png
"""


def add_schedule_commands(commands: Any) -> None:
    """Adds `schedule` with its own commands to the parser's."""
    schedule = commands.add_parser("schedule", help="pipeline schedules: list them, draw them, draw a measured run")
    inner = schedule.add_subparsers(dest="schedule_command", required=True, metavar="command")
    inner.add_parser("list", help="the schedules there are, what they leave idle and what they hold")
    show = inner.add_parser(
        "show",
        help="draw a schedule, or the timeline of a run",
        description=_SHOW,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or csv:PATH")
    show.add_argument("--stages", type=int, help="ranks of the pipeline")
    show.add_argument("--micro-batches", type=int, help="micro-batches of a step")
    show.add_argument("--chunks", type=int, help="stages of each rank; default: the fewest that the schedule has")
    show.add_argument("--forward", type=_times, default=1.0, metavar="T", help="of a forward in a stage (default: 1)")
    show.add_argument("--backward", type=_times, default=1.0, metavar="T", help="of the input half of a backward")
    show.add_argument("--weight", type=_times, default=1.0, metavar="T", help="of the weight half; B takes both")
    show.add_argument("--latency", type=float, default=0.0, metavar="T", help="of a message (default: 0)")
    show.add_argument("--timeline", type=Path, nargs="+", metavar="FILE", help="draw this run: JSON lines of ranks")
    show.add_argument(
        "--step", default="last", metavar="N", help="of a run: the step to draw; `all` in one strip (default: the last)"
    )
    show.add_argument("--output", type=Path, metavar="FILE", help="draw into .png, .svg, .json (Chrome), .jsonl")
    show.add_argument("--dark", action="store_true", help="pictures for a dark page")
    show.add_argument("--csv", type=Path, metavar="FILE", help="write the table, which --schedule csv:FILE reads")
    show.add_argument("--width", type=int, help="characters of a line; default: the terminal's, or 160")


def run_schedule_command(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    try:
        if options.schedule_command == "list":
            print(_list())
        else:
            print(_show(options))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        complain(f"zero-strategy schedule: {error}")
        return 2
    return 0


def _list() -> str:
    rows = []
    for name, schedule in SCHEDULES.items():
        fewest, most = schedule.chunks
        chunks = str(fewest) if most == fewest else f"{fewest} or more"
        rows.append((name, chunks, schedule.idle, schedule.in_flight))
    legend = (
        "p stages, m micro-batches, v chunks per rank; idle where m >= p and forward, I and W take equally long.\n"
        "Held: activations of a rank (s of p) at most, in micro-batches of all its chunks.\n"
        "csv:PATH reads a table from a file; auto chooses by simulation."
    )
    return f"{as_table(rows, ('schedule', 'chunks', 'idle', 'held'))}\n\n{legend}"


def _show(options: argparse.Namespace) -> str:
    timeline, buffers = _timeline(options)
    if options.output is not None:
        _write(timeline, options.output, 1.0 if options.timeline is None else 1e6, options.dark)
    width = options.width or shutil.get_terminal_size((160, 24)).columns
    return f"{text(timeline, width)}\n\n{_summary(timeline, buffers)}"


def _timeline(options: argparse.Namespace) -> tuple[Timeline, list[int] | None]:
    """Schedule or timeline to draw; of a schedule, how many buffers each rank has, too."""
    if options.timeline is not None:
        if options.schedule is not None or options.csv is not None:
            raise ValueError("--timeline draws a run: --schedule and --csv are for schedules")
        return _chosen_step(read_timeline(options.timeline), options.step), None
    missing = [name for name in ("schedule", "stages", "micro_batches") if getattr(options, name) is None]
    if missing:
        wanted = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"a schedule needs {wanted}; a measured run is drawn with --timeline FILE")
    table = build_table(options.schedule, options.stages, options.micro_batches, options.chunks)
    schedules = lower(table)
    check(schedules)
    if options.csv is not None:
        write_csv(table, options.csv)
    times = Times(options.forward, options.backward, options.weight, latency=options.latency)
    return simulate(schedules, times), [schedule.num_pipe_buffers() for schedule in schedules]


def _chosen_step(timeline: Timeline, step: str) -> Timeline:
    if step == "all" or (step == "last" and not timeline.steps):  # files whose lines name no steps
        return timeline
    if step != "last" and not step.isdigit():
        raise ValueError(f"--step {step}: give a number, last or all")
    return timeline.of_step(timeline.steps[-1] if step == "last" else int(step))


def _write(timeline: Timeline, path: Path, microseconds: float, dark: bool) -> None:
    if path.suffix in (".png", ".svg"):
        picture(timeline, path, dark=dark)
    elif path.suffix == ".json":
        path.write_text(chrome_trace(timeline, microseconds), encoding="utf-8")
    elif path.suffix == ".jsonl":
        write_timeline(timeline.events, path)
    else:
        raise ValueError(f"--output {path}: the name must end in .png, .svg, .json or .jsonl")


def _summary(timeline: Timeline, buffers: list[int] | None) -> str:
    scale, unit = scale_of(timeline)
    rows = []
    for rank, usage in enumerate(timeline.usage):
        row = [str(rank), f"{usage.busy * scale:.6g}", f"{usage.idle:.1%}", f"{usage.idle_in_window:.1%}"]
        row += [str(usage.in_flight), f"{usage.activations:.4g}"]
        rows.append((*row, str(buffers[rank])) if buffers else tuple(row))
    busy = f"busy, {unit}" if unit else "busy"
    heads = ("rank", busy, "idle", "in its window", "in flight", "held", *(("buffers",) if buffers else ()))
    makespan = f"{timeline.makespan * scale:.6g}{' ' * bool(unit)}{unit}"
    return f"{timeline.name}: {makespan} in all\n{as_table(rows, heads, range(len(heads)))}"


def _times(value: str) -> float | list[float]:
    """`1.5`, or one for each global stage: `1,1,2,1`."""
    times = [float(part) for part in value.split(",")]
    return times[0] if len(times) == 1 else times


_IDLE = "."
_WAIT = "wait"
_LONG = 10.0
"""Seconds from which on times are told in seconds."""
_NAMES = {
    Kind.FORWARD.value: "forward",
    Kind.BACKWARD.value: "backward",
    Kind.BACKWARD_INPUT.value: "backward, inputs",
    Kind.BACKWARD_WEIGHT.value: "backward, weights",
}


def text(timeline: Timeline, width: int = 160) -> str:
    """A line per rank, time to the right. Computations have their letter, micro-batch and chunk where there is room
    (`F3`; with several chunks `F3a`, `F3b`), and else only their letter. Dots are idle.

    Args:
        timeline: What to draw.
        width: Characters that a line may have.
    """
    head = len(f"rank {timeline.ranks - 1} ")
    events = [event for event in timeline.events if event.computes and event.end > event.start]
    if not events:
        return ""
    shortest = min(event.end - event.start for event in events)
    largest = 1 + max(len(_label(timeline, event)) for event in events)
    scale = (width - head) / timeline.makespan
    if scale * shortest >= 1:  # whole characters, so that what takes equally long looks equally long
        scale = min(largest, int(scale * shortest)) / shortest
    lines = []
    for rank in range(timeline.ranks):
        cells = [_IDLE] * round(timeline.makespan * scale)
        for event in timeline.computations(rank):
            first, last = (round((time - timeline.start) * scale) for time in (event.start, event.end))
            label, room = _label(timeline, event), last - first
            cells[first:last] = label.ljust(room) if len(label) <= room else event.kind * room
        lines.append(f"rank {rank}".ljust(head) + "".join(cells).rstrip(_IDLE + " "))
    return "\n".join(lines)


def scale_of(timeline: Timeline) -> tuple[float, str]:
    """Factor of its times, and the unit they have then: of a run ms, or s where it is long."""
    if not timeline.unit:
        return 1.0, ""
    return (1.0, "s") if timeline.makespan >= _LONG else (1e3, "ms")


def picture(timeline: Timeline, path: Path, *, dark: bool = False) -> None:
    """Write a PNG or SVG: a bar per rank; chunks after the first are drawn lighter.

    Raises:
        ValueError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    scale, unit = scale_of(timeline)
    height = 1.9 + 0.55 * timeline.ranks
    with figure(12, height, dark=dark, option=f"--output {path}") as drawing:
        panel = drawing.subplots()
        drawn = [e for e in timeline.events if e.end > timeline.start and e.start < timeline.start + timeline.makespan]
        _bars(panel, timeline, drawn, scale, dark)
        panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
        panel.set(xlim=(0, timeline.makespan * scale), ylim=(timeline.ranks - 0.5, -0.5))
        panel.set_xlabel(f"time in {unit}" if unit else "time, in units of --forward (1 by default)")
        style(panel, dark=dark, grid="x")
        keys = _keys(timeline, drawn, dark)
        drawing.legend(handles=keys, loc="lower center", ncols=len(keys), fontsize=8, handlelength=1.5)
        idle = sum(usage.idle for usage in timeline.usage) / timeline.ranks
        makespan = f"{timeline.makespan * scale:.4g}{' ' * bool(unit)}{unit}"
        panel.set_title(f"{timeline.name}: {makespan} in all, ranks idle for {idle:.1%} of it", loc="left")
        drawing.tight_layout(rect=(0, 0.3 / height, 1, 1))
        drawing.savefig(path)


def _bars(panel: Any, timeline: Timeline, drawn: Sequence[Event], scale: float, dark: bool) -> None:
    colors, room = theme(dark), timeline.makespan / 150  # for a character
    for event in drawn:
        length, start = event.end - event.start, event.start - timeline.start
        alpha = 1 - 0.5 * event.chunk / max(1, timeline.chunks - 1) if event.computes else 1.0
        panel.broken_barh(
            [(start * scale, length * scale)], (event.rank - 0.42, 0.84), color=_color(event.kind, dark), alpha=alpha,
            edgecolor=colors.page, linewidth=0.5,
        )  # fmt: skip
        label = "" if event.micro_batch is None else str(event.micro_batch)
        if event.computes and length > room * len(label):
            middle = (start + length / 2) * scale
            panel.text(middle, event.rank, label, ha="center", va="center", fontsize=8, clip_on=True)


def _keys(timeline: Timeline, drawn: Sequence[Event], dark: bool) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {event.kind for event in drawn}
    keys = [Patch(facecolor=_color(kind, dark), label=name) for kind, name in _NAMES.items() if kind in kinds]
    if _WAIT in kinds:
        keys.append(Patch(facecolor=_color(_WAIT, dark), label="waiting for data"))
    if any(not event.computes and event.kind != _WAIT for event in drawn):
        keys.append(Patch(facecolor=_color("", dark), label="reductions and the optimizer's step"))
    keys.append(Patch(facecolor="none", edgecolor="none", label="numbers: micro-batches"))
    if timeline.chunks > 1:
        keys.append(Patch(facecolor="none", edgecolor="none", label="lighter: later chunks of a rank"))
    return keys


def _color(kind: str, dark: bool) -> str:
    colors = theme(dark)
    blue, green, *_ = colors.series
    by_kind = {
        Kind.FORWARD.value: blue, Kind.BACKWARD.value: green, Kind.BACKWARD_INPUT.value: green,
        Kind.BACKWARD_WEIGHT.value: colors.series[8], _WAIT: colors.idle,
    }  # fmt: skip
    return by_kind.get(kind, colors.series[-1])


def chrome_trace(timeline: Timeline, microseconds: float = 1e6) -> str:
    """A trace for chrome://tracing or Perfetto, as JSON; a thread per rank.

    Args:
        timeline: What to draw.
        microseconds: That the timeline's unit is.
    """
    records: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.name}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(timeline.ranks)
        ),
    ]
    for event in timeline.events:
        records.append(
            {
                "ph": "X",
                "name": _label(timeline, event),
                "cat": _NAMES.get(event.kind, event.kind),
                "pid": 0,
                "tid": event.rank,
                "ts": event.start * microseconds,
                "dur": (event.end - event.start) * microseconds,
                "args": {"micro_batch": event.micro_batch, "chunk": event.chunk},
            }
        )
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, indent=None)


def _label(timeline: Timeline, event: Event) -> str:
    if not event.computes or event.micro_batch is None:
        return event.kind
    chunk = "" if timeline.chunks == 1 else chr(ord("a") + event.chunk) if event.chunk < 26 else f".{event.chunk}"
    return f"{event.kind}{event.micro_batch}{chunk}"
