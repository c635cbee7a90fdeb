"""Timelines as text, as pictures, and as traces for a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.timeline import Event, Timeline

_IDLE = "."
_COLORS = {
    Kind.FORWARD.value: "#4c78c8",
    Kind.BACKWARD.value: "#4ca86b",
    Kind.BACKWARD_INPUT.value: "#45b5b0",
    Kind.BACKWARD_WEIGHT.value: "#9ccb7a",
}
_WAIT = "wait"
_WAITING, _OTHER = "#dcdcdc", "#8c8c8c"
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
    """What to multiply its times by, and the unit they have then: of a run ms, or s where it is long."""
    if not timeline.unit:
        return 1.0, ""
    return (1.0, "s") if timeline.makespan >= _LONG else (1e3, "ms")


def picture(timeline: Timeline, path: Path) -> None:
    """Write a PNG or SVG: a bar per rank; chunks after the first are drawn lighter.

    Raises:
        ValueError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"--output {path} needs matplotlib: pip install matplotlib") from error
    scale, unit = scale_of(timeline)
    figure: Any = Figure(figsize=(14, 1.9 + 0.55 * timeline.ranks), dpi=120)
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    room = timeline.makespan / 150  # for a character
    drawn = [e for e in timeline.events if e.end > timeline.start and e.start < timeline.start + timeline.makespan]
    for event in drawn:
        length, start = event.end - event.start, event.start - timeline.start
        alpha = 1 - 0.5 * event.chunk / max(1, timeline.chunks - 1) if event.computes else 1.0
        panel.broken_barh(
            [(start * scale, length * scale)], (event.rank - 0.42, 0.84), color=_color(event), alpha=alpha,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        label = "" if event.micro_batch is None else str(event.micro_batch)
        if event.computes and length > room * len(label):
            middle = (start + length / 2) * scale
            panel.text(middle, event.rank, label, ha="center", va="center", fontsize=8, clip_on=True)
    panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    panel.set(xlim=(0, timeline.makespan * scale), ylim=(timeline.ranks - 0.5, -0.5))
    panel.set_xlabel(f"time in {unit}" if unit else "time, in units of --forward (1 by default)")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(left=False)
    keys = [
        Patch(facecolor=_COLORS[kind], label=name)
        for kind, name in _NAMES.items()
        if any(event.kind == kind for event in drawn)
    ]
    if any(event.kind == _WAIT for event in drawn):
        keys.append(Patch(facecolor=_WAITING, label="waiting for data"))
    if any(not event.computes and event.kind != _WAIT for event in drawn):
        keys.append(Patch(facecolor=_OTHER, label="reductions and the optimizer's step"))
    keys.append(Patch(facecolor="none", edgecolor="none", label="numbers: micro-batches"))
    if timeline.chunks > 1:
        keys.append(Patch(facecolor="none", edgecolor="none", label="lighter: later chunks of a rank"))
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), fontsize=8, frameon=False, handlelength=1.5)
    idle = sum(usage.idle for usage in timeline.usage) / timeline.ranks
    makespan = f"{timeline.makespan * scale:.4g}{' ' * bool(unit)}{unit}"
    panel.set_title(f"{timeline.name}: {makespan} in all, ranks idle for {idle:.1%} of it", fontsize=11, loc="left")
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    with rc_context({"svg.fonttype": "none"}):  # text that can be searched and edited
        figure.savefig(path)


def _color(event: Event) -> str:
    return _COLORS.get(event.kind, _WAITING if event.kind == _WAIT else _OTHER)


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
