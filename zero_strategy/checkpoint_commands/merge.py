"""`zero-strategy checkpoint merge`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zero_strategy.runtime.terminal import parser_for, progress_bar


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "merge",
        "make an ordinary checkpoint of the pieces that ranks wrote",
        "Makes an ordinary checkpoint of one that was saved in pieces: where ranks share no file system, or to an\n"
        "object store. Every byte is compared with its checksum.\n"
        "Exit status: 0 done, 2 not done.",
        "  zero-strategy checkpoint merge host0/step200 host1/step200 --output step200\n"
        "  zero-strategy checkpoint merge s3://bucket/run/step200 --output step200",
    )
    parser.add_argument("directory", nargs="+", help="what has all pieces (or its URL), or those of all hosts")
    parser.add_argument("--output", required=True, help="the new checkpoint; must not exist")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.merge import merge

    with progress_bar(options, "merge") as progress:
        made = merge(options.directory, options.output, progress)
    if options.json:
        found = {"directory": str(made.directory), "ranks": made.ranks, "files": made.files, "bytes": made.bytes}
        print(json.dumps(found, indent=1))
    else:
        print(f"{made.directory}: made of the pieces of {made.ranks} rank(s) ({made.files} files, {made.bytes} bytes)")
    return 0
