"""JSON that others wrote: parsed under a bound on how deep it is nested, with errors that name where it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from zero_strategy.runtime.shown import shown

MOST_DEPTH = 200
"""Levels of objects and lists; a walk over a value of fewer stays far from Python's bound on recursion."""


def parse(
    text: str | bytes,
    source: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        source: The file or address that it came from, for errors.
        object_pairs_hook: As of `json.loads`.
        parse_constant: Likewise.

    Raises:
        ValueError: If it is no JSON, no UTF-8, or nested too deeply; names `source`.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(f"{shown(source)}: not valid JSON: {_TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"{shown(source)}: not valid JSON: {shown(error)}") from None
    check_depth(value, source)
    return value


def check_depth(value: Any, source: str, most: int = MOST_DEPTH) -> None:
    """Walks a value of dicts and lists level by level.

    Raises:
        ValueError: If it has more levels; names `source`.
    """
    level = [value]
    for _ in range(most + 1):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"{shown(source)}: not valid JSON: {_TOO_DEEP}")


_TOO_DEEP = f"nested more than {MOST_DEPTH} levels deep"
