"""`zero-strategy report` and `zero-strategy trace`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

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
    from zero_strategy.diagnostics.report import chrome_trace, write_report
    from zero_strategy.diagnostics.run_files import read_run

    path = options.output or options.directory / options.default_output
    try:
        run = read_run(options.directory)
        if options.command == "report":
            write_report(run, path)
            what = f"{len(run.numbers)} steps of {len(run.steps)} rank(s)"
        else:
            trace = chrome_trace(run)
            path.write_text(json.dumps(trace), encoding="utf-8")
            what = f"{len(trace['traceEvents'])} events of {len(run.traces)} rank(s); open it in https://ui.perfetto.dev"
    except (ValueError, OSError) as error:
        print(f"zero-strategy {options.command}: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {what}")
    return 0
