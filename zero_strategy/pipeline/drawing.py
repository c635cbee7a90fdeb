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
_OTHER = "#c0c0c0"
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


def picture(timeline: Timeline, path: Path) -> None:
    """Write a PNG or SVG: a bar per rank; chunks after the first are drawn lighter.

    Raises:
        ValueError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"--output {path} needs matplotlib: pip install zero-strategy[plan]") from error
    figure: Any = Figure(figsize=(14, 1.2 + 0.55 * timeline.ranks), dpi=120)
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    room = timeline.makespan / 150  # for a character
    for event in timeline.events:
        length, start = event.end - event.start, event.start - timeline.start
        alpha = 1 - 0.5 * event.chunk / max(1, timeline.chunks - 1) if event.computes else 0.5
        color = _COLORS.get(event.kind, _OTHER)
        panel.broken_barh(
            [(start, length)], (event.rank - 0.42, 0.84), color=color, alpha=alpha, edgecolor="white", linewidth=0.5
        )
        label = "" if event.micro_batch is None else str(event.micro_batch)
        if event.computes and length > room * len(label):
            panel.text(start + length / 2, event.rank, label, ha="center", va="center", fontsize=7)
    panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    panel.set(xlim=(0, timeline.makespan), ylim=(timeline.ranks - 0.5, -0.5), xlabel="time")
    kinds = [kind for kind in _NAMES if any(event.kind == kind for event in timeline.events)]
    keys = [Patch(facecolor=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=keys, loc="lower center", ncols=4, fontsize=8, frameon=False)
    idle = sum(usage.idle for usage in timeline.usage) / timeline.ranks
    panel.set_title(f"{timeline.name}: {timeline.makespan:.4g} in all, {idle:.1%} idle", fontsize=10)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    figure.savefig(path)


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
