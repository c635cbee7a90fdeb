"""`zero-strategy config convert`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from zero_strategy.config import DeepSpeedSettings, ZeroConfig, load_config
from zero_strategy.config.section import DEFAULT
from zero_strategy.config.unknown import owner_of


def add(actions: Any) -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "convert",
        help="write DeepSpeed's JSON as a YAML file of ours",
        description=(
            "Writes the settings that a DeepSpeed JSON sets as a YAML file for ZeroStrategy(config=...). What the\n"
            "framework owns (batch size, clipping, precision, optimizer) is noted in comments, with its own argument.\n"
            "Exit status: 0, or 2 if a key is rejected or the file cannot be read."
        ),
        epilog="examples:\n  zero-strategy config convert ds_config.json -o zero.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="DeepSpeed's JSON (also as base64)")
    parser.add_argument("-o", "--output", metavar="OUT", help="where to write; default: standard output")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    if options.output is not None and os.path.exists(options.output):
        raise ValueError(f"{options.output} exists already; remove it, or give another name to -o")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = load_config(options.file)
    if config.deepspeed is None:
        raise ValueError(f"{options.file} is no DeepSpeed JSON; its settings are ours already")
    for warning in said:
        print(warning.message, file=sys.stderr)
    text = as_yaml(config, config.deepspeed)
    if options.output is None:
        print(text, end="")
    else:
        with open(options.output, "x", encoding="utf-8") as file:
            file.write(text)
    return 0


def as_yaml(config: ZeroConfig, found: DeepSpeedSettings) -> str:
    """The settings that are set, as YAML that `load_config` reads, with what others own in comments."""
    values: dict[str, Any] = {}
    for key, setting in config.settings():
        if setting.origin == DEFAULT:
            continue
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = setting.value
    lines = [f"# From {found.origin.removeprefix('user: ')}. Settings that are not here have zero_strategy's defaults."]
    for key, setting in found.owned.items():
        named = {"optimizer": found.optimizer, "scheduler": found.scheduler}.get(key)
        value = setting.value if named is None else f"{named.type} {dict(named.params)}"
        lines.append(f"# {key}: {value} is not set here: {owner_of(key)}")
    text: str = yaml.safe_dump(values, sort_keys=False)
    return "\n".join(lines) + "\n" + text
