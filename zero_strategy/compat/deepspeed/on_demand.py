"""Packages of the module tree import what they are asked for when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, rooms: tuple[str, ...], names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: Its full name.
        rooms: Modules of it.
        names: What is in its modules, or in others: name to module, relative to the package or of `zero_strategy`.
    """

    def get(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if names is None or name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = names[name]
        return getattr(import_module(place if place.startswith("zero_strategy") else f"{package}.{place}"), name)

    return get
