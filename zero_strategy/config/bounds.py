"""Bounds on a config file, so that reading one ends, and soon, whoever wrote it.

YAML's aliases multiply: nine lists of nine references to each other are a billion nodes. So do OmegaConf's references,
when they are resolved. Both are counted before anything is built.
"""

from __future__ import annotations

import re
from typing import Any

MOST_BYTES = 256 << 10
MOST_NODES = 5_000
"""Keys and values, those that aliases repeat included."""
MOST_LEVELS = 50
MOST_REFERENCES = 16
"""To other settings, as in ${stage}: of so many, each resolved through the others, there are some hundred at most."""
MOST_INTERPOLATIONS = 500
MOST_NESTED_INTERPOLATIONS = 5

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")


def check_yaml(text: str) -> None:
    """Counts what a YAML text stands for.

    Raises:
        ValueError: If it is more than a config, or an alias is a part of itself.
        yaml.YAMLError: If it is no YAML.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]

    sizes: dict[str, int] = {}  # nodes of what each anchor names
    opened: list[tuple[str | None, int]] = []  # anchor of each collection around, and the count where it began
    count = interpolations = references = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise ValueError(f"the alias *{event.anchor} is a part of what it stands for")
            count += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
            found, others = _interpolations(event.value)
            interpolations, references = interpolations + found, references + others
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if count > MOST_NODES:
            raise ValueError(f"it stands for more than {MOST_NODES} keys and values")
        if len(opened) > MOST_LEVELS:
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
        if interpolations > MOST_INTERPOLATIONS or references > MOST_REFERENCES:
            raise ValueError(
                f"it has more than {MOST_REFERENCES} references to other settings, or more than "
                f"{MOST_INTERPOLATIONS} interpolations"
            )


def _interpolations(text: str) -> tuple[int, int]:
    """Number of interpolations in a value, and of those that are none of the environment's."""
    count = text.count("${")
    if count:
        level = deepest = 0
        for mark in re.findall(r"\$\{|\}", text):
            level = level + 1 if mark == "${" else max(level - 1, 0)
            deepest = max(deepest, level)
        if deepest > MOST_NESTED_INTERPOLATIONS:
            raise ValueError(f"a value has interpolations in each other, more than {MOST_NESTED_INTERPOLATIONS} deep")
    return count, count - len(_ENVIRONMENT.findall(text))


def check_values(value: Any, source: str) -> None:
    """Counts the nodes and levels of a parsed JSON.

    Raises:
        ValueError: If there are more than in a config; names `source`.
    """
    level, count = [value], 0
    for _ in range(MOST_LEVELS + 1):
        count += len(level)
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if count + len(level) > MOST_NODES:
            raise ValueError(f"{source}: has more than {MOST_NODES} values")
        if not level:
            return
    raise ValueError(f"{source}: is nested more than {MOST_LEVELS} levels deep")
