"""`zero-strategy checkpoint ...`: tools for checkpoint directories."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_checkpoint_commands(commands: Any) -> None:
    """Adds `checkpoint` to the parser's commands."""
    parser = commands.add_parser("checkpoint", help="tools for checkpoint directories")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    verify = actions.add_parser(
        "verify",
        help="compare every byte with its checksum",
        description="Reads a checkpoint and compares every byte with its checksum. Exit status: 0 whole, 1 damaged, "
        "2 no checkpoint.",
    )
    verify.add_argument("directory", help="a checkpoint, or its parent with a `latest` file")
    verify.add_argument("--json", action="store_true", help="print what was found as JSON")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")


def run_checkpoint_command(options: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status."""
    assert options.action == "verify"
    return _verify(options)


def _verify(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from zero_strategy.checkpoint.verify import Progress, verify

    bars: list[Any] = []

    def progress(total: int) -> Progress:
        hidden = options.quiet or options.json or not sys.stderr.isatty()
        bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=hidden)
        bars.append(bar)
        return lambda count: bar.update(count)

    try:
        verdict = verify(options.directory, progress)
    except (ValueError, OSError) as error:
        if options.json:
            print(json.dumps({"directory": options.directory, "problems": [str(error)]}, indent=1))
        else:
            print(error, file=sys.stderr)
        return 2
    finally:
        for bar in bars:
            bar.close()
    if options.json:
        found = {"directory": str(verdict.directory), "files": verdict.files, "bytes": verdict.bytes}
        print(json.dumps({**found, "problems": list(verdict.problems)}, indent=1))
    else:
        for problem in verdict.problems:
            print(problem)
        judgement = f"{len(verdict.problems)} problem(s)" if verdict.problems else "whole"
        print(f"{verdict.directory}: {judgement} ({verdict.files} files, {verdict.bytes} bytes)")
    return int(bool(verdict.problems))
