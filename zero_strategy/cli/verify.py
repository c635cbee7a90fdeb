"""`zero-strategy verify`, and failures of ranks in sentences.

A message of this package is a sentence already. Of other errors the line of the user's code is named that raised, or
that called what raised.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_strategy.runtime.terminal import complain

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig
    from zero_strategy.verify.compare import VerifyReport


_DESCRIPTION = """\
Trains your model on your batches for a few steps, sharded as chosen and in one plain process of torch, and compares
losses, every gradient, every parameter and every state of the optimizer. The first tensor that differs is reported by
name, step, rank and phase, with the size of the difference against what re-ordered summation explains.

FACTORY is a function without arguments, path.py:function or package.module:function, that every rank calls and that
returns the same each time: (model, optimizer, batches, loss), where optimizer(model) makes the optimizer and
loss(model, batch) the loss, or (LightningModule, dataloader). Micro-batch a of rank r in step s is batch number
(s x accumulation + a) x ranks + r; batches start over at their end. Rank 0 needs the memory of a whole model besides.

Of a pipeline (--strategy pipeline, --stages, or pipeline.stages of the config) it returns (layers, optimizer, batches,
loss): layers as PipelineModule takes them, batches of (inputs, labels), loss(outputs, labels); or (LightningModule with
configure_pipeline, dataloader). Micro-batch a of copy d of the pipeline is batch (s x micro-batches + a) x copies + d.

With --against the distributed side is not this package's: DistributedDataParallel, FSDP2 or DeepSpeed around the model
of the same factory, or code of your own: a function(subject, settings), path.py:function, that returns an object with
backward(batches), update() and weights() (zero_strategy.verify.distributed_run.DistributedRun). Values may differ by
rounding, since the order in which others sum is not known; what differs more is named, with the kind of fault that the
numbers point to.

Exit status: 0 if nothing differs; 1 if something does; 2 if it could not be run."""

_EXAMPLES = """\
examples:
  zero-strategy verify train.py:factory --strategy zero3_offload --ranks 2 --steps 5
  zero-strategy verify my_package.models:factory --config zero.yaml --dtype bf16 --clip 1.0 --accumulation 4
  zero-strategy verify train.py:layers --strategy pipeline --ranks 4 --stages 2 --stage 2 --accumulation 4
  zero-strategy verify train.py:factory --against fsdp2 --clip 1.0 --dtype bf16
  zero-strategy verify train.py:factory --against parallel.py:make --ranks 4
"""

_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


def add_verify_command(commands: Any) -> None:
    """Adds `verify` to the parser's commands."""
    parser = commands.add_parser(
        "verify",
        help="prove that a configuration trains your model as one plain process does",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("factory", metavar="FACTORY", help="path.py:function or package.module:function")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--strategy", metavar="NAME", help="zero1, zero2, zero3, zero2_offload, ..., pipeline")
    chosen.add_argument("--config", metavar="FILE", help="our YAML or DeepSpeed's JSON, as for training")
    parser.add_argument(
        "--against",
        metavar="SIDE",
        help="a distributed training that is not this package's: ddp, fsdp2, deepspeed, plain (gradients averaged by "
        "hand), or path.py:function of your own; deepspeed takes --stage and --config, fsdp2 --stage 2 or 3",
    )
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="on top of it; default: the config's, 3")
    parser.add_argument("--stages", type=int, metavar="N", help="of a pipeline; default: the config's or all ranks")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes to start (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--accumulation", type=int, default=1, metavar="N", help="micro-batches per step and rank, or per pipeline"
    )
    parser.add_argument("--clip", type=float, metavar="NORM", help="bound of the gradient norm; default: none")
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), default="fp32", help="of parameters in computation; fp16 scales losses"
    )
    parser.add_argument(
        "--autocast", nargs="?", choices=("bf16", "fp16"), const="bf16", help="over float32 parameters instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the factory and the ranks (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="TIMES",
        help="how many times what re-ordered summation explains may differ; 0: bits have to be equal; default: 0 where "
        "the order can be reproduced (on the CPU, without --against), else 8",
    )
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="until the ranks are given up")
    parser.add_argument("--traceback", action="store_true", help="where a rank failed, all that it raised")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run_verify_command(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, with a message on stderr where it is 2."""
    from zero_strategy.comm.local_ranks import LocalRankError

    try:
        report = _verified(options)
    except LocalRankError as error:
        said = str(error) if options.traceback else in_sentences(error.failures)
        return _could_not(said, options, "" if options.traceback else "--traceback shows all that the ranks raised")
    except (ValueError, TypeError, OSError) as error:
        return _could_not(str(error), options)
    except KeyboardInterrupt:  # the ranks are gone by now
        print("interrupted", file=sys.stderr)
        return 130
    return show(report, as_json=options.json)


def _could_not(said: str, options: argparse.Namespace, hint: str = "") -> int:
    if options.json:
        print(json.dumps({"error": said}, indent=1))
    complain(said)
    if hint:
        complain(f"({hint})")
    return 2


def show(report: VerifyReport, *, as_json: bool) -> int:
    """Print a report; returns the command's exit status."""
    print(json.dumps(report.to_json(), indent=1) if as_json else report)
    return int(not report.passed)


def _verified(options: argparse.Namespace) -> VerifyReport:
    from zero_strategy.verify import verify_on_new_ranks

    if options.against is not None:
        return _against(options)
    config, given = asked(options)
    return verify_on_new_ranks(options.factory, config, given, options.ranks, options.timeout)


def asked(options: argparse.Namespace) -> tuple[ZeroConfig, dict[str, Any]]:
    """The config that options describe, and how to train.

    Raises:
        ValueError: If they make no sense.
    """
    from zero_strategy.config import load_config, preset
    from zero_strategy.verify.subject import VerifySettings

    named = options.strategy == "pipeline"
    source = {"stage": 1} if named else preset(options.strategy) if options.strategy else options.config
    config = load_config(source, **({} if options.stage is None else {"stage": options.stage}))
    if named or options.stages is not None:
        stages = options.ranks if options.stages is None else options.stages
        if stages < 2:
            raise ValueError(f"a pipeline of {stages} stage(s): give --ranks or --stages 2 or more")
        config.pipeline.record("stages", stages, "--stages")
    if config.pipeline.stages > 1 and options.accumulation > 1 and config.pipeline.micro_batches is None:
        config.pipeline.record("micro_batches", options.accumulation, "--accumulation")
    given = _how(options)
    VerifySettings(**given)  # refused here, not on some rank
    return config, given


def _how(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of the training."""
    import torch

    dtype = _DTYPES[options.dtype]
    return {
        "steps": options.steps,
        "accumulation": options.accumulation,
        "clip_norm": options.clip,
        "compute_dtype": None if dtype is None else getattr(torch, dtype),
        "autocast": None if options.autocast is None else getattr(torch, str(_DTYPES[options.autocast])),
        "seed": options.seed,
        "tolerance": options.tolerance,
    }


def _against(options: argparse.Namespace) -> VerifyReport:
    """Compare a distributed training that is not this package's."""
    from zero_strategy.runtime.bounded_json import parse
    from zero_strategy.runtime.regular_files import read_text
    from zero_strategy.verify.against import verify_against

    for name in ("strategy", "stages"):
        if (value := getattr(options, name)) is not None:
            raise ValueError(f"--{name} {value} is of this package's trainings; leave it out with --against")
    given = None if options.config is None else parse(read_text(options.config), options.config)
    return verify_against(
        options.factory,
        options.against,
        ranks=options.ranks,
        stage=options.stage,
        deepspeed_config=given,
        timeout=options.timeout,
        **_how(options),
    )


_HEAD = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (_OWN, *(path + os.sep for path in {sysconfig.get_path(name) for name in ("purelib", "platlib")}))
_SENTENCES = ("ValueError", "TypeError", "FileNotFoundError", "NotImplementedError")
"""Classes whose messages, where this package raises them, need no class before them."""


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    name: str


def in_sentences(failures: Mapping[int, str]) -> str:
    """Events that happened on ranks, a line or so for each different thing.

    Args:
        failures: By rank, a traceback as Python prints it, or a sentence.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(sentence(text), []).append(rank)
    if len(ranks_of) == 1 and len(failures) > 1:
        return next(iter(ranks_of))
    return "\n".join(f"{_ranks(ranks)}: {said}" for said, ranks in ranks_of.items())


def sentence(text: str) -> str:
    """The last exception of a traceback and its place in the user's code; other text as it is."""
    begin = text.rfind(_HEAD)
    if begin < 0:
        return text.strip()
    frames, said = _divided(text[begin + len(_HEAD) :])
    users = [frame for frame in frames if not frame.file.startswith((*_NOT_THE_USERS, "<"))]
    kind, _, message = said.partition(": ")
    if frames and frames[-1].file.startswith(_OWN) and kind in _SENTENCES and message:
        return message
    place = f" ({users[-1].file}, line {users[-1].line}, in {users[-1].name})" if users else ""
    return said + place


def _divided(block: str) -> tuple[list[Frame], str]:
    """The frames of one traceback, and the exception below them."""
    lines = block.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    frames = [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(block)]
    return frames, "\n".join(lines[end:]).strip()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
