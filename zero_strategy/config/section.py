"""A section of the config: a dataclass that checks itself and knows where its values came from.

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

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast, get_origin, get_type_hints

from .rules import ACCEPTS, check_value, wrong_type

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
        """Whether a field has a value that was derived from others."""
        recorded = self._recorded.get(name)
        return recorded is not None and recorded.value == getattr(self, name) and recorded.origin.startswith("derived")

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
