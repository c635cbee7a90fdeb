"""Writes objects of classes that are not installed here, for the program that has them.

A pickle names a class and gives the instance's attributes. The class is looked up by whoever reads the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class ForeignObject:
    """An instance of a class elsewhere; see `foreign`. Equal to nothing but itself."""


def foreign(full_name: str, attributes: Mapping[str, Any]) -> ForeignObject:
    """An instance of a class, for `save` to write.

    Args:
        full_name: "module.Class".
        attributes: What the instance's `__dict__` will be where it is read.
    """
    module, _, name = full_name.rpartition(".")
    made: ForeignObject = type(name, (ForeignObject,), {"__module__": module, "__qualname__": name})()
    vars(made).update(attributes)
    return made


def save(value: Any, path: Path) -> None:
    """`torch.save` of a value with `foreign` objects in it.

    Args:
        value: As for `torch.save`.
        path: The file.
    """
    torch.save(value, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))


class _Pickler(pickle._Pickler):
    """Python's own pickler in Python: the one in C cannot be told how to write a class."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, ForeignObject) and obj is not ForeignObject:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]
