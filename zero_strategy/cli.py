"""The command line.

zero-strategy build [--cuda] [--arch 90]   compile the native ops and the file I/O into the cache
zero-strategy doctor                       what this installation has: versions, compilers, every op native or why not
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
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from zero_strategy.checkpoint_commands import add_checkpoint_commands, run_checkpoint_command
from zero_strategy.config_commands import add_config_commands, run_config_command
from zero_strategy.diagnostics.command import add_report_commands, run_report_command
from zero_strategy.diagnostics.verify_command import add_verify_command, run_verify_command
from zero_strategy.pipeline.command import add_schedule_commands, run_schedule_command
from zero_strategy.planning import add_plan_command, run_plan_command

_PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "safetensors",
    "omegaconf",
    "ninja",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="zero-strategy", description="Tools of zero_strategy.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    build = commands.add_parser("build", help="compile the native ops and the file I/O into the cache")
    build.add_argument("--cuda", action="store_true", help="the CUDA library too")
    build.add_argument(
        "--arch", action="append", default=[], metavar="90", help="CUDA architecture; default: this machine's devices"
    )
    build.add_argument("--anew", action="store_true", help="also if they are there already")
    build.add_argument("--verbose", action="store_true", help="on failure, all that the compiler said")
    commands.add_parser("doctor", help="versions, compilers, and for every op whether it is native, or why not")
    add_checkpoint_commands(commands)
    add_config_commands(commands)
    add_plan_command(commands)
    add_verify_command(commands)
    add_report_commands(commands)
    add_schedule_commands(commands)
    options = parser.parse_args(arguments)
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
        else:
            status = _doctor()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _build(names: Sequence[str], options: argparse.Namespace) -> int:
    from zero_strategy.ops.build import BuildError, build, recipe

    failed = False
    for name in names:
        try:
            path = build(recipe(name, options.arch), anew=options.anew)
        except BuildError as error:
            failed = True
            print(f"{name}: not built: {error}", file=sys.stderr)
            if options.verbose:
                print(error.log, file=sys.stderr)
        else:
            print(f"{name}: {path}")
    return int(failed)


def _doctor() -> int:
    import torch

    import zero_strategy
    from zero_strategy.ops.build import recipe
    from zero_strategy.ops.cache import cache_directory
    from zero_strategy.ops.native import libraries, ops_report

    print(f"zero_strategy {zero_strategy.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print("packages: " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    print(f"CUDA: {torch.version.cuda or 'this torch has none'}, devices: {torch.cuda.device_count()}")
    print(f"cores: {os.cpu_count()}, torch threads: {torch.get_num_threads()}")
    print(f"cache: {cache_directory()}")
    for name in ("cpu", "cuda"):
        compiler = recipe(name).compiler
        print(f"{name} compiler: {compiler or 'none found'}")
        status = libraries.ensure(name)
        print(f"{name} library: {status.path or 'not loaded: ' + status.reason}")
        for op, state in ops_report(name):
            print(f"  {op:<28} {state}")
    print(f"file I/O: {_file_io()}")
    return 0


def _file_io() -> str:
    from zero_strategy.memory import open_queue

    try:
        with open_queue() as queue:
            return f"{queue.backend}, since {queue.reason}" if queue.reason else queue.backend
    except (OSError, RuntimeError, ValueError) as error:
        return f"not available: {error}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


if __name__ == "__main__":
    sys.exit(main())
