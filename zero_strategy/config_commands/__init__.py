"""`zero-strategy config ...`: what a config file means, one module per action."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any

_ACTIONS = ("explain", "convert")


def add_config_commands(commands: Any) -> None:
    """Adds `config` to the parser's commands."""
    parser = commands.add_parser("config", help="what a config file means")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name in _ACTIONS:
        import_module(f"{__name__}.{name}").add(actions)


def run_config_command(options: argparse.Namespace) -> int:
    """Runs the chosen action; returns the exit status: 2, and a message on stderr, where it cannot be done."""
    try:
        status: int = import_module(f"{__name__}.{options.action}").run(options)
    except (ValueError, TypeError, OSError) as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": str(error)}, indent=1))
        print(error, file=sys.stderr)
        return 2
    return status
