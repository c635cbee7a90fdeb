"""`zero-strategy checkpoint ...`: tools for checkpoint directories, one module per action."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any

_ACTIONS = ("inspect", "verify", "diff", "convert", "merge", "prune")


def add_checkpoint_commands(commands: Any) -> None:
    """Adds `checkpoint` to the parser's commands."""
    parser = commands.add_parser("checkpoint", help="tools for checkpoint directories")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name in _ACTIONS:
        import_module(f"{__name__}.{name}").add(actions)


def run_checkpoint_command(options: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status: 2, and a message on stderr, where it cannot be done."""
    try:
        status: int = import_module(f"{__name__}.{options.action}").run(options)
    except (ValueError, OSError, ImportError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=1))
        print(error, file=sys.stderr)
        return 2
    return status
