"""The settings as keywords are those of the config: each field once, with its type and the short forms of sections."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Literal, get_args, get_type_hints

from zero_strategy.config import ZeroConfig, ZeroSettings
from zero_strategy.config.section import is_section, typed_fields


def test_keywords_are_the_fields_in_their_order_and_described() -> None:
    names = [field.name for field in fields(ZeroConfig)]
    assert list(ZeroSettings.__annotations__) == names
    assert ZeroSettings.__total__ is False
    described = inspect.getdoc(ZeroSettings) or ""
    assert [name for name in names if f"    {name}: " not in described] == []


def test_types_are_those_of_the_fields_or_what_stands_for_them() -> None:
    hints = get_type_hints(ZeroSettings)
    for field, hint in typed_fields(ZeroConfig):
        wanted: set[Any] = {hint, type(None)} | set(get_args(hint) if type(None) in get_args(hint) else ())
        if is_section(hint):
            wanted |= {dict[str, Any]} | ({str} if hint.scalar else set()) | ({bool} if hint.booleans else set())
            wanted |= {int} if hint.scalar == "slots" else {bool} if hint.scalar == "enabled" else set()
        wanted |= {Literal["auto"]} if field.name == "stage" else set()
        assert set(get_args(hints[field.name])) <= wanted and type(None) in get_args(hints[field.name]), field.name
