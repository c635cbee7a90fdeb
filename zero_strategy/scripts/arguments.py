"""Command line arguments of scripts."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from typing import Any


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a parser, and return it.

    `--deepspeed` is for the script itself to look at; `--deepspeed_config FILE` is what `initialize(args=...)` reads.
    `--deepspeed_mpi` is accepted: how ranks find each other is found out (`init_distributed`). `--deepscale` and
    `--deepscale_config` are old spellings.

    Raises:
        argparse.ArgumentError: If the parser has one of them already.
    """
    group = parser.add_argument_group("DeepSpeed", "settings of sharded training")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="config file, JSON or YAML")
    group.add_argument("--deepscale", action="store_true", help="old spelling of --deepspeed")
    group.add_argument("--deepscale_config", metavar="FILE", default=None, help="old spelling of --deepspeed_config")
    group.add_argument("--deepspeed_mpi", action="store_true", help="accepted; MPI's ranks are found in any case")
    return parser


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The one config among those that `initialize` may be given.

    Args:
        args: A namespace or mapping, or None.
        config: The argument of that name.
        config_params: The same under an old name.

    Raises:
        ValueError: If there is none, or more than one; names them.
    """
    sources = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": argument(args, "deepspeed_config"),
        "args.deepscale_config": argument(args, "deepscale_config"),
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given, which are sources of one config; drop all but one")
    if not given:
        raise ValueError(
            "no config: pass initialize(config=...), a mapping or a path, or --deepspeed_config FILE through args"
        )
    if given[0] == "args.deepscale_config":
        warnings.warn("--deepscale_config is an old spelling; use --deepspeed_config", stacklevel=3)
    return sources[given[0]]


def argument(args: Any, name: str) -> Any:
    """An argument of a namespace or a mapping; None if it is not there."""
    if args is None:
        return None
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
