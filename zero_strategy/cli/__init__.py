"""The command line.

zero-strategy --version                    of this package
zero-strategy build [--cuda] [--arch 90]   compile the native ops and the file I/O into the cache
zero-strategy doctor                       what this installation has, what is wrong with it, and what to do
zero-strategy checkpoint inspect PATH      what a checkpoint of any format holds
zero-strategy checkpoint verify DIR        read a checkpoint and compare every byte with its checksums
zero-strategy checkpoint diff A B          what differs between two checkpoints
zero-strategy checkpoint convert IN OUT    from any format to any other
zero-strategy checkpoint prune DIR         remove old checkpoints
zero-strategy checkpoint merge DIR ...     make an ordinary checkpoint of the pieces that ranks wrote
zero-strategy plan MODEL                   what every rank of a run will hold, and whether it fits
zero-strategy verify FACTORY               prove that a configuration trains your model as one plain process does
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

from zero_strategy.cli.checkpoint import add_checkpoint_commands, run_checkpoint_command
from zero_strategy.cli.config import (
    add_accelerate_config_command,
    add_config_commands,
    run_accelerate_config_command,
    run_config_command,
)
from zero_strategy.cli.doctor import add_doctor_command, run_doctor_command
from zero_strategy.cli.plan import add_plan_command, run_plan_command
from zero_strategy.cli.report import add_report_commands, run_report_command
from zero_strategy.cli.schedule import add_schedule_commands, run_schedule_command
from zero_strategy.cli.verify import add_verify_command, run_verify_command
from zero_strategy.runtime.terminal import complain
from zero_strategy.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in files are anybody's, and a terminal may be ASCII
    parser = argparse.ArgumentParser(prog="zero-strategy", description="Tools of zero_strategy.")
    parser.add_argument("--version", action="version", version=f"zero-strategy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    build = commands.add_parser("build", help="compile the native ops and the file I/O into the cache")
    build.add_argument("--cuda", action="store_true", help="the CUDA library too")
    build.add_argument(
        "--arch", action="append", default=[], metavar="90", help="CUDA architecture; default: this machine's devices"
    )
    build.add_argument("--anew", action="store_true", help="also if they are there already")
    build.add_argument("--verbose", action="store_true", help="on failure, all that the compiler said")
    add_doctor_command(commands)
    add_checkpoint_commands(commands)
    add_config_commands(commands)
    add_plan_command(commands)
    add_verify_command(commands)
    add_report_commands(commands)
    add_schedule_commands(commands)
    add_accelerate_config_command(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if options.command == "build":
            status = _build(["cpu", "io", "cuda"] if options.cuda else ["cpu", "io"], options)
        elif options.command == "checkpoint":
            status = run_checkpoint_command(options)
        elif options.command == "config":
            status = run_config_command(options)
        elif options.command == "plan":
            status = run_plan_command(options)
        elif options.command == "verify":
            status = run_verify_command(options)
        elif options.command in ("report", "trace"):
            status = run_report_command(options)
        elif options.command == "schedule":
            status = run_schedule_command(options)
        elif options.command == "accelerate-config":
            status = run_accelerate_config_command(options)
        else:
            status = run_doctor_command(options)
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
