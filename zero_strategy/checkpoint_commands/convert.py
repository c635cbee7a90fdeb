"""`zero-strategy checkpoint convert`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.terminal import parse_size, parser_for, progress_bar, size

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "convert",
        "from any format to any other",
        "Converts a checkpoint. The target appears whole or not at all, and nothing is overwritten. Nothing that a\n"
        "file says is executed. Exit status: 0 done, 2 error.\n\n"
        "from: native, deepspeed, deepspeed-universal, torch, dcp, lightning, accelerate; found out if not given\n"
        "to:   native, hf (safetensors weights alone), torch (one .pt), dcp, deepspeed-universal,\n"
        "      lightning (one .ckpt that Trainer(strategy=\"ddp\") resumes; all of it is in memory meanwhile)",
        "  zero-strategy checkpoint convert --from deepspeed runs/ds ours --tag global_step100\n"
        "  zero-strategy checkpoint convert runs/step200 model --to hf --dtype bfloat16 --max-file-size 2GB\n"
        "  zero-strategy checkpoint convert runs/step200 step200.pt --to torch\n"
        "  zero-strategy checkpoint convert checkpoints/last.ckpt plain.ckpt --to lightning",
    )
    parser.add_argument("source", metavar="IN", help="a checkpoint")
    parser.add_argument("target", metavar="OUT", help="the new one; must not exist")
    parser.add_argument("--from", dest="from_format", metavar="F", help="the format of IN")
    parser.add_argument("--to", dest="to_format", metavar="F", default="native", help="that of OUT; default native")
    parser.add_argument("--dtype", choices=_DTYPES, help="of floating-point weights; default: as they are")
    parser.add_argument(
        "--max-file-size", type=parse_size, default=5_000_000_000, metavar="5GB", help="of one file of weights"
    )
    parser.add_argument("--tag", metavar="T", help="which checkpoint of a folder; default: the one that `latest` names")
    parser.add_argument("--prefix", metavar="P", help="take this off the beginnings of names; default: what DDP adds")
    parser.add_argument("--weights-only", action="store_true", help="leave all but the weights out")
    parser.add_argument(
        "--names",
        metavar="FILE",
        help="JSON list of the optimizer's parameter names in its order, for files that say numbers only",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    import torch

    from zero_strategy.checkpoint.convert import convert

    with progress_bar(options, "convert") as progress:
        state = convert(
            options.source,
            options.target,
            from_format=options.from_format,
            to_format=options.to_format,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            max_file_bytes=options.max_file_size,
            weights_only=options.weights_only,
            names=None if options.names is None else _names(Path(options.names)),
            options={key: value for key in ("tag", "prefix") if (value := getattr(options, key)) is not None},
            progress=progress,
        )
    total = sum(tensor.spec.nbytes for _, tensor in state.tensors())
    if options.json:
        counts = {"weights": len(state.weights), "optimizers": len(state.optimizers), "bytes": total}
        print(json.dumps({"target": options.target, **counts}, indent=1))
    else:
        what = f"{len(state.weights)} weights, {len(state.optimizers)} optimizer(s), {size(total)}"
        print(f"{options.target}: {options.to_format}, {what}")
    return 0


def _names(path: Path) -> list[str]:
    try:
        names = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if isinstance(names, list) and all(isinstance(group, list) for group in names):
        names = [name for group in names for name in group]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: is no list of names")
    return names
