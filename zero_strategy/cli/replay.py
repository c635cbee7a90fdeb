"""`zero-strategy replay`: a step of a recorded run trained again, or the place where two runs part."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from zero_strategy.runtime.terminal import complain

if TYPE_CHECKING:
    from zero_strategy.replay import BisectReport, ReplayReport

_DESCRIPTION = """\
Compares the bits of a run with reproducible.slots, as its journals in RUN (diagnostics.run_dir) have them.

With --step the run is trained again up to a step, in this one process, from the last checkpoint before it (in RUN, or
in --checkpoints) or else from the beginning: the same slots, however many ranks computed them. With --bisect the
journals of two runs are compared, which may have had other numbers of ranks and other stages; nothing is trained.

The first difference is told by step, slot, rank, module and kind: config, weights, data, seed, kernel (outputs differ
though data and random numbers are equal), race (gradients differ though losses are equal), norm. Steps count from 0.

The factory is a function without arguments that returns (model, optimizer, batches, loss), as `zero-strategy verify`
takes it; batches are a function of (step, slot), a mapping with such keys, or a list or loader whose number
step x slots + slot is the batch of a slot.

Exit status: 0 if nothing differs; 1 if something does; 2 if it could not be run."""

_EXAMPLES = """\
examples:
  zero-strategy replay runs/7 --step 812 --factory train.py:factory
  zero-strategy replay runs/7 --step 812 --factory train.py:factory --checkpoints checkpoints
  zero-strategy replay runs/7 --bisect runs/8
"""


def add_replay_command(commands: Any) -> None:
    """Adds `replay` to the parser's commands."""
    parser = commands.add_parser(
        "replay",
        help="train a step of a run again and compare its bits, or find where two runs part",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="directory of the run, as diagnostics.run_dir named it")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="train again up to this step, counted from 0")
    what.add_argument("--bisect", metavar="OTHER_RUN", help="compare with the journals of another run")
    parser.add_argument(
        "--factory",
        metavar="FACTORY",
        help="path.py:function or package.module:function; default: diagnostics.journal_factory of the run",
    )
    parser.add_argument("--checkpoints", metavar="DIR", help="where checkpoints of the run are; default: RUN")
    parser.add_argument("--seed", type=int, default=0, help="of the factory (default: %(default)s)")
    parser.add_argument(
        "--recorded-hyper",
        action="store_true",
        help="take all hyper-parameters from the journal, instead of comparing those that no scheduler changes",
    )
    parser.add_argument("--device", metavar="DEVICE", help="where to compute, such as cuda; default: cpu")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run_replay_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, with a message on stderr where it is 2."""
    try:
        report = _reported(options)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=1))
        complain(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(json.dumps(report.to_json(), indent=1) if options.json else report)
    return int(not report.equal)


def _reported(options: argparse.Namespace) -> ReplayReport | BisectReport:
    from zero_strategy.replay import bisect

    if options.bisect is not None:
        return bisect(options.run, options.bisect)
    import torch

    from zero_strategy.replay import replay

    if options.step < 0:
        raise ValueError(f"--step is {options.step}; accepted: 0 or more")
    return replay(
        options.run,
        options.step,
        options.factory,
        checkpoints=options.checkpoints,
        seed=options.seed,
        recorded_hyper=options.recorded_hyper,
        device=None if options.device is None else torch.device(options.device),
    )
