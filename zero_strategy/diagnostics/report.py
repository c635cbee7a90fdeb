"""A recorded run as one HTML page, which needs nothing beside itself: no network, no other file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from zero_strategy.diagnostics.report_data import report_data
from zero_strategy.diagnostics.run_files import RecordedRun


def report_page(run: RecordedRun) -> str:
    """The page's text."""
    parts = files("zero_strategy.diagnostics") / "page"
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
