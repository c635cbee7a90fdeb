"""Lists and tuples in the state of an optimizer (SOAP's factors), taken apart for files and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MARK = "zero_strategy:"
_KINDS: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"list": list, "tuple": tuple}


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state whose lists and tuples are taken apart, as files hold it; see `nested`.

    `{"Q": [a, b]}` becomes `{"Q": "zero_strategy:list:2", "Q.0": a, "Q.1": b}`.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if type(value) in (list, tuple):
            found[key] = f"{_MARK}{type(value).__name__}:{len(value)}"
            found |= flattened({f"{key}.{number}": item for number, item in enumerate(value)})
        else:
            found[key] = value
    return found


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flattened`."""
    found = dict(state)
    marked = [key for key, value in state.items() if isinstance(value, str) and value.startswith(_MARK)]
    for key in sorted(marked, key=len, reverse=True):  # inner ones have longer keys
        kind, _, length = found[key].removeprefix(_MARK).partition(":")
        found[key] = _KINDS[kind](found.pop(f"{key}.{number}") for number in range(int(length)))
    return found
