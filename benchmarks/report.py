"""Rows of suites as JSON, as a table in markdown, and as pictures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.suite import Row

_NO_PICTURES = "pictures: matplotlib is not installed: pip install -e '.[bench]', then --redraw"
_LARGE = 20.0
"""A ratio that needs a logarithmic axis, so that the others can be told apart."""
_LEGEND = (
    "Ratio: the other's figure over ours (for speeds: ours over the other's), median with its 95 % interval; above 1 "
    "ours is better."
)


def write_json(path: Path, suite: str, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """All of a suite, with machine, versions, date and command."""
    path.write_text(json.dumps({"suite": suite, **facts, "rows": [asdict(row) for row in rows]}, indent=1, default=str))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `write_json` has written.

    Raises:
        ValueError: If it is no such file.
    """
    try:
        return [Row(**row) for row in json.loads(path.read_text())["rows"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no result of python -m benchmarks: {error!r}") from error


def figure(value: float, unit: str) -> str:
    """A number as people read it: 1.5 s, 12.3 ms, 45.6 MiB."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    if unit == "bytes/s":
        return f"{value / 1e9:.2f} GB/s"
    return f"{value:,.0f}"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| what | against | ratio | 95 % interval | the other | ours | note |", "| --- " * 7 + "|"]
    for row in rows:
        cells = (
            row.what,
            row.peer,
            f"{row.ratio:.3f}",
            f"{row.low:.3f} - {row.high:.3f}",
            figure(row.theirs, row.unit),
            figure(row.ours, row.unit),
            row.note,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(rows: Sequence[Row], facts: dict[str, Any], skipped: Sequence[str]) -> str:
    """The table with what must be known to read it."""
    machine, versions = facts["machine"], facts["versions"]
    memory = f"{machine['memory'] / 2**30:.0f} GiB"
    parts = [
        f"{facts['date']}, {machine['processor']}, {machine['cores']} cores, {memory}, {machine['system']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"`{facts['command']}`",
        _LEGEND,
        table(rows),
        *(f"Not measured: {text}" for text in skipped),
    ]
    return "\n\n".join(parts) + "\n"


def picture(path: Path, suite: str, rows: Sequence[Row]) -> str | None:
    """Draws the ratios as bars with their intervals.

    Returns:
        Why there is no picture, or None.
    """
    if not rows:
        return f"picture of {suite}: nothing was measured"
    if importlib.util.find_spec("matplotlib") is None:
        return _NO_PICTURES
    from matplotlib.figure import Figure

    labels = [f"{row.what} / {row.peer}" for row in rows]
    ratios = [row.ratio for row in rows]
    below = [max(row.ratio - row.low, 0.0) for row in rows]
    above = [max(row.high - row.ratio, 0.0) for row in rows]
    drawing = Figure(figsize=(10, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = drawing.subplots()
    colors = ["tab:green" if row.low >= 1 else "tab:red" if row.high < 1 else "tab:gray" for row in rows]
    widths = [ratio - 1 for ratio in ratios]
    if max(ratios) > _LARGE:
        axes.set_xscale("log")
    axes.barh(range(len(rows)), widths, left=1.0, color=colors, xerr=[below, above], ecolor="black", capsize=2)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("the other's figure over ours, with 95 % interval; right of 1 ours is better")
    axes.set_title(suite)
    drawing.savefig(path, dpi=120)
    return None
