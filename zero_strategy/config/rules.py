"""Which values a setting accepts: its exact type and its range.

Types are compared, never converted: ``"3"`` is no int, ``True`` is no int and ``2.0`` is no int. There are three
exceptions: an int where a float is expected is stored as a float, a path object where a string is expected as that
string, and one string where a list of them is expected as a list of one.

A range is an `Accepts`, kept in the metadata of the dataclass field it belongs to:

    growth_interval: int = field(default=2000, metadata=at_least(1))
"""

from __future__ import annotations

import math
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, Union, get_args, get_origin

ACCEPTS = "accepts"
"""Key of a field's metadata under which its `Accepts` is kept."""


class Accepts(NamedTuple):
    """The accepted values of a setting (for a list: of each element)."""

    text: str
    """The accepted values in words, for error messages."""
    test: Callable[[Any], bool]
    """True for an accepted value. It is called with values of the right type only."""


def one_of(*choices: object) -> dict[str, Accepts]:
    """Accepts exactly the given values."""
    shown = ", ".join(repr(choice) for choice in choices)
    return {ACCEPTS: Accepts(shown, lambda value: value in choices)}


def at_least(minimum: int) -> dict[str, Accepts]:
    """Accepts numbers from a minimum upwards."""
    return {ACCEPTS: Accepts(f"{minimum} or more", lambda value: value >= minimum)}


def between(low: float, high: float) -> dict[str, Accepts]:
    """Accepts finite numbers strictly between two bounds; ``math.inf`` leaves the upper side open."""
    text = f"finite, above {low:g}" if high == math.inf else f"above {low:g} and below {high:g}"
    # NaN fails every comparison, infinity and ints too large for a float fail the last one.
    return {ACCEPTS: Accepts(text, lambda value: low < value < high and value <= sys.float_info.max)}


def within(low: float, high: float) -> dict[str, Accepts]:
    """Accepts numbers from one bound to another, both included."""
    return {ACCEPTS: Accepts(f"{low:g} to {high:g}", lambda value: low <= value <= high)}


def matching(pattern: str, text: str) -> dict[str, Accepts]:
    """Accepts strings that match a regular expression from end to end; `text` says which in words."""
    return {ACCEPTS: Accepts(text, lambda value: re.fullmatch(pattern, value) is not None)}


def non_empty() -> dict[str, Accepts]:
    """Accepts strings of at least one character that is not blank."""
    return {ACCEPTS: Accepts("a non-empty string", lambda value: bool(value.strip()))}


def check_value(key: str, value: Any, hint: Any, accepts: Accepts | None, origin: str | None = None) -> Any:
    """Checks one value of a setting.

    Args:
        key: Full dotted key of the setting, for error messages.
        value: The value.
        hint: Declared type: a plain type, ``X | None`` or ``list[X]``.
        accepts: The accepted values, or None where every value of the type is one.
        origin: Where the value came from, for error messages.

    Returns:
        The value; an int becomes a float where a float is declared, a path its string, one string a list of it where a
        list is declared.

    Raises:
        TypeError: If the value is not of the declared type.
        ValueError: If it is of the type, but not accepted.
    """
    options = _options(hint)
    if value is None and types.NoneType in options:
        return None
    expected = next(option for option in options if option is not types.NoneType)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if get_origin(expected) is list:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise TypeError(wrong_type(key, value, type_name(hint), origin))
        (element,) = get_args(expected)
        return [check_value(f"{key}[{i}]", item, element, accepts, origin) for i, item in enumerate(value)]
    if not _is_plain(value, expected):
        raise TypeError(wrong_type(key, value, type_name(hint), origin))
    if accepts is not None and not accepts.test(value):
        also = " or None" if types.NoneType in options else ""
        raise ValueError(f"{key} is {value!r}{from_origin(origin)}; accepted: {accepts.text}{also}")
    return float(value) if expected is float else value


def wrong_type(key: str, value: object, expected: str, origin: str | None) -> str:
    """Message for a value of the wrong type."""
    return f"{key} is {value!r} ({type(value).__name__}){from_origin(origin)}; expected {expected}"


def from_origin(origin: str | None) -> str:
    """An origin as it appears behind a key or a value in an error message."""
    return f" [{origin}]" if origin else ""


def type_name(hint: Any) -> str:
    """A declared type as a user writes it: ``int``, ``int | None``, ``list[str]``."""
    return " | ".join(
        "None" if option is types.NoneType else str(option) if get_origin(option) else str(option.__name__)
        for option in _options(hint)
    )


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_plain(value: object, expected: type) -> bool:
    # bool is a subclass of int, and yet `stage: true` is a mistake.
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, (int, float) if expected is float else expected)
