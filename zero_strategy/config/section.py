"""A section of the config: a dataclass that checks types and ranges, and knows where each value came from.

Types are compared, never converted: ``"3"`` is no int, ``True`` is no int and ``2.0`` is no int. There are three
exceptions: an int where a float is expected is stored as a float, a path object where a string is expected as that
string, and one string where a list of them is expected as a list of one.

A range is an `Accepts`, kept in the metadata of the dataclass field it belongs to:

    growth_interval: int = field(default=2000, metadata=at_least(1))

Origins are kept beside the dataclass fields, not among them, so that ``OmegaConf.structured`` sees only the
settings. They travel with the object through copy, deepcopy and pickle. An origin is remembered together with
the value it explains: assign another value and the old origin no longer counts.

=========================  ==========================================================
origin                     meaning
=========================  ==========================================================
``default``                nobody set it
``user: zero.yaml``        set in this file; likewise ``keyword``, ``mapping``, ``DictConfig``
``user: Python``           given to a constructor, to ``dataclasses.replace``, or assigned
``derived: ...``           computed, from what is named
anything else              the framework's own place, such as ``Trainer(precision="bf16-mixed")``
=========================  ==========================================================
"""

from __future__ import annotations

import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

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


DEFAULT = "default"
PYTHON = "user: Python"


class Setting(NamedTuple):
    """A value and where it came from."""

    value: Any
    """The value."""
    origin: str
    """Its origin, see the table above."""


@dataclass
class Section:
    """Base of all config dataclasses: checks and origins."""

    prefix: ClassVar[str] = ""
    """Dotted path of the section in the config, with a dot at its end; empty for the root."""
    scalar: ClassVar[str] = ""
    """The setting that a single value in place of the section stands for; empty: there is none."""
    booleans: ClassVar[Mapping[bool, str]] = {}
    """Values of that setting that may be written as a truth value. (YAML reads `off` as one.)"""

    def __post_init__(self) -> None:
        self._recorded: dict[str, Setting] = {}
        self.check()

    def check(self) -> None:
        """Checks every value of this section and of those below it.

        Raises:
            TypeError: If a value is not of its declared type.
            ValueError: If a value is out of its range.
        """
        for field, hint in typed_fields(type(self)):
            key, value = self.prefix + field.name, getattr(self, field.name)
            if not is_section(hint):
                setattr(self, field.name, check_value(key, value, hint, field.metadata.get(ACCEPTS)))
            elif isinstance(value, hint):
                value.check()
            else:
                expected = f"{hint.__name__} (load_config accepts a mapping)"
                raise TypeError(wrong_type(key, value, expected, None))

    def settings(self) -> Iterator[tuple[str, Setting]]:
        """Yields the full key, value and origin of every setting, in the order of declaration."""
        for field, hint in typed_fields(type(self)):
            value = getattr(self, field.name)
            if is_section(hint):
                yield from value.settings()
            else:
                yield self.prefix + field.name, Setting(value, self._origin(field, value))

    def record(self, name: str, value: Any, origin: str) -> None:
        """Sets one field of this section and remembers where the value came from."""
        setattr(self, name, value)
        # A new dict, as shallow copies share the old one; a copy of the value, as lists can change.
        self._recorded = {**self._recorded, name: Setting(copy(value), origin)}

    def is_derived(self, name: str) -> bool:
        """True if a field has a value that was derived from others, or chosen: nobody has asked for it."""
        recorded = self._recorded.get(name)
        if recorded is None or recorded.value != getattr(self, name):
            return False
        return recorded.origin.startswith(("derived", "chosen"))

    def _origin(self, field: Field[Any], value: Any) -> str:
        recorded = self._recorded.get(field.name)
        if recorded is not None and recorded.value == value:
            return recorded.origin
        return DEFAULT if value == default_of(field) else PYTHON


def typed_fields(section: type[Section]) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a section with their types resolved."""
    return _typed_fields(cast(Any, section))  # mypy takes the class for unhashable, as its instances are


@cache  # resolving takes as long as all the rest of loading a config
def _typed_fields(section: type[Section]) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(section)
    return tuple((field, hints[field.name]) for field in fields(section))


def is_section(hint: Any) -> bool:
    """True for the type of a nested section."""
    # Python 3.10 takes list[str] for a type, and then fails in issubclass.
    return get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, Section)


def default_of(field: Field[Any]) -> Any:
    """The default value of a field."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def table(settings: Iterable[tuple[str, Setting]]) -> str:
    """Formats settings as aligned columns: key, value, origin."""
    rows = [("key", "value", "origin")]
    rows += [(key, " ".join(str(setting.value).split()), setting.origin) for key, setting in settings]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{key:{key_width}}  {value:{value_width}}  {origin}" for key, value, origin in rows)
