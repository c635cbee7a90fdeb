"""`zero-strategy run`: a script on this host's processes, of which the others go on when one dies."""

from __future__ import annotations

import argparse
from typing import Any

from zero_strategy.runtime.terminal import complain

_DESCRIPTION = """\
Starts a script in several processes of this host, and starts one that has died (SIGKILL, out of memory, a crash) again
in its place. The others are left alone: a script that trains by zero_strategy.survive, or under a Trainer with
survive: true, goes on without it within seconds, and takes it in again at the end of a step.

torchft's lighthouse says who is there. Without --lighthouse one is started here, for this host alone. On several hosts
give all of them its address, and let one start it (--serve-lighthouse).

A script that ends with an error ends the run: it would do so again."""

_EXAMPLES = """\
examples:
  zero-strategy run --nproc-per-node 4 train.py --epochs 3
  zero-strategy run --nproc-per-node 8 --nnodes 2 --node-rank 0 --run-id r7 --address head \\
      --lighthouse http://head:29510 --serve-lighthouse train.py       # and with --node-rank 1 on the other host
"""


def add_run_command(commands: Any) -> None:
    """Adds `run` to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="run a script in processes that are started again when they die, while the others go on",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes of this host (1)")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts, with as many processes each (1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="number of this host (0)")
    parser.add_argument("--max-restarts", type=int, default=1000, metavar="N", help="of processes of this host (1000)")
    parser.add_argument("--lighthouse", default="", metavar="URL", help="address of the lighthouse of all hosts")
    parser.add_argument("--serve-lighthouse", action="store_true", help="start it, at the port of that address")
    parser.add_argument("--address", default="127.0.0.1", metavar="NAME", help="under which others reach this host")
    parser.add_argument("--run-id", default="", metavar="NAME", help="of the run, equal on all hosts")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE",
        help="import it once for all processes, such as lightning or transformers",
    )  # fmt: skip
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument("script", metavar="SCRIPT", help="file, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for the script")


def run_run_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, with a message on stderr where it is 2."""
    if options.nnodes > 1 and not (options.lighthouse and options.run_id):
        complain(ValueError(f"--nnodes {options.nnodes} needs --lighthouse URL and --run-id NAME, equal on all hosts"))
        return 2
    from zero_strategy.survive.agent import Agent, Launch

    launch = Launch(
        options.script, options.arguments, module=options.module, processes=options.nproc_per_node,
        first=options.node_rank * options.nproc_per_node, places=options.nnodes * options.nproc_per_node,
        lighthouse=options.lighthouse, serves=options.serve_lighthouse, address=options.address,
        restarts=options.max_restarts, preload=options.preload,
    )  # fmt: skip
    if options.run_id:
        launch.run = options.run_id
    try:
        return Agent(launch).run()
    except (ImportError, OSError) as error:
        complain(error)
        return 2
