"""The command line.

zero-strategy --version                    of this package
zero-strategy build [--cuda] [--arch 90]   compile the native ops and the file I/O into the cache
zero-strategy doctor                       what this installation has, what is wrong with it, and what to do
zero-strategy checkpoint inspect PATH      what a checkpoint of any format holds
zero-strategy checkpoint verify DIR        read a checkpoint and compare every byte with its checksums
zero-strategy checkpoint diff A B          where two checkpoints, or two runs, first differ
zero-strategy checkpoint convert IN OUT    from any format to any other
zero-strategy checkpoint prune DIR         remove old checkpoints
zero-strategy checkpoint merge DIR ...     make an ordinary checkpoint of the pieces that ranks wrote
zero-strategy plan MODEL                   what every rank of a run will hold, and whether it fits
zero-strategy verify FACTORY               prove that a configuration trains your model as one plain process does
zero-strategy run SCRIPT                   start processes; when one dies the others go on, and it is started again
zero-strategy replay RUN --step N          train a step of a recorded run again, and compare its bits
zero-strategy replay RUN --bisect OTHER    find where two recorded runs part
zero-strategy report RUN_DIR               a recorded run as an HTML page
zero-strategy trace RUN_DIR                the same as a Chrome trace
zero-strategy schedule show                draw a pipeline schedule, or what ranks did in a run
zero-strategy schedule list                the pipeline schedules there are
zero-strategy config explain FILE          every setting a config leads to, and what becomes of DeepSpeed's keys
zero-strategy config convert FILE          write DeepSpeed's JSON as a YAML file of ours
zero-strategy accelerate-config [FILE]     write a launch file for `accelerate launch --config_file`
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from zero_strategy.cli.arguments import CommandParser
from zero_strategy.runtime.terminal import complain
from zero_strategy.version import __version__


class Command(NamedTuple):
    """The place of a command's definition."""

    module: str
    """In this package. It is imported for its own commands alone: others need not wait for torch."""
    add: str
    """Its function that adds the command, and those of the module beside it, to a parser."""
    run: str
    """Its function from the parsed options to the exit status."""


_REPORT = Command("report", "add_report_commands", "run_report_command")
_COMMANDS = {
    "doctor": Command("doctor", "add_doctor_command", "run_doctor_command"),
    "checkpoint": Command("checkpoint", "add_checkpoint_commands", "run_checkpoint_command"),
    "config": Command("config", "add_config_commands", "run_config_command"),
    "plan": Command("plan", "add_plan_command", "run_plan_command"),
    "verify": Command("verify", "add_verify_command", "run_verify_command"),
    "run": Command("run", "add_run_command", "run_run_command"),
    "replay": Command("replay", "add_replay_command", "run_replay_command"),
    "report": _REPORT,
    "trace": _REPORT,
    "schedule": Command("schedule", "add_schedule_commands", "run_schedule_command"),
    "accelerate-config": Command("config", "add_accelerate_config_command", "run_accelerate_config_command"),
}


def _function(command: Command, name: str) -> Any:
    return getattr(import_module(f"{__name__}.{command.module}"), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in files are anybody's, and a terminal may be ASCII
    parser = CommandParser(prog="zero-strategy", description="Tools of zero_strategy.")
    parser.add_argument("--version", action="version", version=f"zero-strategy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    build = commands.add_parser("build", help="compile the native ops and the file I/O into the cache")
    build.add_argument("--cuda", action="store_true", help="the CUDA library too")
    build.add_argument(
        "--arch", action="append", default=[], metavar="90", help="CUDA architecture; default: this machine's devices"
    )
    build.add_argument("--anew", action="store_true", help="also if they are there already")
    build.add_argument("--verbose", action="store_true", help="on failure, all that the compiler said")
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = next((word for word in given if not word.startswith("-")), None)
    if first in _COMMANDS:
        wanted = [_COMMANDS[first]]
    else:  # the help, and what is said of a command that is not there, list them all
        wanted = [] if first == "build" or given == ["--version"] else list(dict.fromkeys(_COMMANDS.values()))
    for command in wanted:
        _function(command, command.add)(commands)
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if options.command == "build":
            status = _build(["cpu", "io", "cuda"] if options.cuda else ["cpu", "io"], options)
        else:
            chosen = _COMMANDS[options.command]
            status = _function(chosen, chosen.run)(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _build(names: Sequence[str], options: argparse.Namespace) -> int:
    from zero_strategy.ops.build import BuildError, UntrustedCacheError, build, recipe

    failed = False
    for name in names:
        try:
            path = build(recipe(name, options.arch), anew=options.anew)
        except (BuildError, UntrustedCacheError) as error:
            failed = True
            complain(f"{name}: not built: {error}")
            if options.verbose and isinstance(error, BuildError):
                print(error.log, file=sys.stderr)
        else:
            print(f"{name}: {path}")
    return int(failed)
