"""`zero-strategy doctor`."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import Any

_DESCRIPTION = """\
Looks at what training needs here: versions, devices, compilers, native ops, file I/O, limits of memory, and whether two
ranks can train together. Each line is ok, warn (it costs time or memory, or one feature) or fail, with what to do.

Exit status: 0 if nothing fails, 1 if something does."""


def add_doctor_command(commands: Any) -> None:
    """Adds `doctor` to the parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="what this installation has, what is wrong with it, and what to do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-train", action="store_true", help="do not train on two ranks, which takes some seconds")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="until that is given up")
    parser.add_argument("--json", action="store_true", help="print all as JSON")


def run_doctor_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from zero_strategy.diagnostics.doctor import findings

    found = []
    for finding in findings(train=not options.no_train, timeout=options.timeout):
        found.append(finding)
        if options.json:
            continue
        print(f"{finding.state:<5} {finding.name}: {finding.what}", flush=True)
        for line in finding.details:
            print(textwrap.fill(line, 110, initial_indent=" " * 8, subsequent_indent=" " * 10, break_long_words=False))
        if finding.advice:
            print(f"      -> {finding.advice}", flush=True)
    failed = any(finding.state == "fail" for finding in found)
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, indent=1))
    return int(failed)
