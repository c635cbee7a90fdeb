"""JSON that gives back exactly what it was given, or refuses.

The standard module turns tuples into lists, integer keys into strings and NaN into a token that other
parsers reject, and on reading keeps the last of two equal keys. A checkpoint must do none of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_FLOAT = "$float"
_TUPLE = "$tuple"


def encode(value: object, where: str) -> Any:
    """Translates a value into what the json module writes without loss.

    Finite floats need no care: json writes the shortest digits that read back as the same double.

    Args:
        value: None, bool, int, float, str, or a list, tuple or string-keyed mapping of such.
        where: path of the value, for errors.

    Returns:
        The same value with tuples and non-finite floats wrapped in one-key mappings.

    Raises:
        TypeError: if a value or a key has a type that JSON would change or cannot hold.
        ValueError: if a key begins with "$", which is reserved for the wrappers.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {_key(key, where): encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} has type {type(value).__name__}; a manifest holds only None, bool, int, float, str, "
        "and lists, tuples and string-keyed mappings of these"
    )


def decode(value: Any) -> Any:
    """Undoes `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        return {key: decode(item) for key, item in value.items()}
    return value


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        data: UTF-8 text.
        source: the file it came from, for errors.

    Returns:
        The object, not yet decoded.

    Raises:
        ValueError: naming `source`, if the text is not strict JSON, has a key twice, or is no object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    return value


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; keys must be strings")
    if key.startswith("$"):
        raise ValueError(f"{where} has the key {key!r}; keys beginning with '$' are reserved")
    return key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")
