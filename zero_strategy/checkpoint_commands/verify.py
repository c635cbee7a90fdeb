"""`zero-strategy checkpoint verify`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from zero_strategy.runtime.terminal import parser_for, progress_bar


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "verify",
        "compare every byte with its checksum",
        "Reads a checkpoint and compares every byte with its checksum.\n"
        "Exit status: 0 whole, 1 damaged, 2 no checkpoint.",
        "  zero-strategy checkpoint verify runs/step200\n"
        "  zero-strategy checkpoint verify runs   # what `latest` names",
    )
    parser.add_argument("directory", help="a checkpoint, or its parent with a `latest` file")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.verify import verify

    try:
        with progress_bar(options, "verify") as progress:
            verdict = verify(options.directory, progress)
    except (ValueError, OSError) as error:
        if options.json:
            print(json.dumps({"directory": options.directory, "problems": [str(error)]}, indent=1))
        else:
            print(error, file=sys.stderr)
        return 2
    if options.json:
        found = {"directory": str(verdict.directory), "files": verdict.files, "bytes": verdict.bytes}
        print(json.dumps({**found, "problems": list(verdict.problems)}, indent=1))
    else:
        for problem in verdict.problems:
            print(problem)
        judgement = f"{len(verdict.problems)} problem(s)" if verdict.problems else "whole"
        print(f"{verdict.directory}: {judgement} ({verdict.files} files, {verdict.bytes} bytes)")
    return int(bool(verdict.problems))
