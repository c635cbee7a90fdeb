r"""Checkpoints of DeepSpeed made universal. The command

    python -m zero_strategy.compat.deepspeed.checkpoint.ds_to_universal \
        --input_folder ROOT/TAG --output_folder ROOT/TAG_universal

has DeepSpeed's options. Everything is read and written tensor by tensor in one process, so that there is no temporary
folder; what is written loads at stages 1, 2 and 3, whichever the input had.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_USAGE = "--input_folder ROOT/TAG --output_folder ROOT/TAG_universal"


def universal_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Turns a DeepSpeed checkpoint into a universal one.", epilog=_USAGE
    )
    parser.add_argument("--input_folder", required=True, help="directory of one tag of a DeepSpeed checkpoint")
    parser.add_argument("--output_folder", required=True, help="directory of the universal checkpoint")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="has no effect")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="has no effect")
    parser.add_argument("--keep_temp_folder", action="store_true", help="has no effect: there is none")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="patterns that match no parameter are no error"
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="without universal_checkpoint_info, join tensor-parallel shards along dimension 0",
    )
    return parser.parse_args(arguments)


def convert_to_universal(args: argparse.Namespace | None = None) -> None:
    """Convert, as the command does.

    Args:
        args: `input_folder`, `output_folder`, and, if they are to have an effect, `strict` and `inject_missing_state`.
            None takes the command line.

    Raises:
        ValueError: Naming what is missing or damaged in the input, patterns that match no parameter, or what the format
            cannot hold.
        OSError: If the file system fails.
    """
    from zero_strategy.convert import deepspeed
    from zero_strategy.convert import universal_read as deepspeed_universal
    from zero_strategy.convert.megatron import MergeRules

    args = universal_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    model = _first_model(source)
    info = model.get("universal_checkpoint_info")
    options: dict[str, Any] = {}
    if info is None and getattr(args, "inject_missing_state", False) and _tensor_ranks(model) > 1:
        options["rules"] = MergeRules()
    state = deepspeed.read(source, **options)
    if info is not None:
        from zero_strategy.convert.deepspeed_model import plain

        unused = MergeRules.from_info(info).unused(name for group in state.optimizers for name in _trained_names(group))
        if unused and getattr(args, "strict", True):
            raise ValueError(
                f"{source}: patterns of universal_checkpoint_info match no parameter: {unused}; correct them, or pass "
                "--no_strict"
            )
        state.user["deepspeed"] = {**state.user.get("deepspeed", {}), "universal_checkpoint_info": plain(info)}
    deepspeed_universal.write(state, target)


def _first_model(source: Path) -> Any:
    from zero_strategy.convert.deepspeed import read_model_files
    from zero_strategy.convert.deepspeed_files import CheckpointFiles

    if not source.is_dir():
        raise ValueError(f"{source} is not a directory")
    files = CheckpointFiles.find(source)
    if not files.ranks:
        raise ValueError(f"{source} is not a DeepSpeed checkpoint; name the directory of one tag, not its parent")
    return read_model_files(files.ranks[min(files.ranks)]).first


def _tensor_ranks(model: Any) -> int:
    found = model.get("checkpoint_parallel_dimensions") or {}
    return int(found.get("tp_degree") or model.get("mp_world_size") or 1)


def _trained_names(optimizer: Any) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["params"]]
