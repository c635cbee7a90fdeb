"""`zero-strategy checkpoint prune`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zero_strategy.runtime.terminal import parser_for, size, table


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "prune",
        "remove old checkpoints of a folder",
        "Removes all complete checkpoints of a folder but the newest ones. The newest, and the one that `latest`\n"
        "names, always stay; what is no complete checkpoint is left alone. Exit status: 0 done, 2 error.",
        "  zero-strategy checkpoint prune runs --keep-last 3 --dry-run\n"
        "  zero-strategy checkpoint prune runs --keep-last 3 --keep-every 1000",
    )
    parser.add_argument("directory", help="the folder")
    parser.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many of the newest stay")
    parser.add_argument(
        "--keep-every", type=int, default=0, metavar="M", help="those whose step is a multiple of M stay, too"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.retention import find_checkpoints, remove_checkpoints, which_to_remove

    if options.keep_last < 1:
        raise ValueError(f"--keep-last {options.keep_last}: give 1 or more")
    found = find_checkpoints(options.directory)
    chosen = which_to_remove(found, options.keep_last, options.keep_every)
    if not options.dry_run:
        remove_checkpoints(entry.path for entry in chosen)
    rows = [
        {
            "name": entry.path.name,
            "step": entry.step,
            "bytes": entry.bytes,
            "complete": entry.complete,
            "latest": entry.is_latest,
            "removed": entry in chosen,
        }
        for entry in found
    ]
    if options.json:
        print(json.dumps({"directory": options.directory, "dry_run": options.dry_run, "checkpoints": rows}, indent=1))
        return 0
    gone = "would go" if options.dry_run else "removed"
    state = [
        gone if entry in chosen else "stays" if entry.complete else "incomplete, left alone" for entry in found
    ]
    lines = [
        [entry.path.name, "-" if entry.step is None else entry.step, size(entry.bytes), what]
        for entry, what in zip(found, state, strict=True)
    ]
    if lines:
        print(table(lines, ("checkpoint", "step", "size", ""), right=(1, 2)))
    print(f"{len(chosen)} of {len(found)} {gone}, {size(sum(entry.bytes for entry in chosen))}")
    return 0
