"""What stages hand to each other, taken apart: tensors on one side, the structure around them on the other.

A structure is a value of JSON, so that it fits into a message's header:

    ["t", 0]                     tensor number 0; the same object at two places has one number
    ["v", 3]                     None, a bool, an integer, a float or a string
    ["tuple", [...]]             also "list"
    ["dict", [[key, ...], ...]]  keys are strings, numbers, None
    ["object", "module:Name", [[field, ...], ...]]
                                 a dataclass, a named tuple, or a dict of a class of its own, as ModelOutput
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_strategy.distributed.dtensors import is_dtensor

Structure = list[Any]

_PLAIN = (bool, int, float, str, type(None))


def take_apart(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of a value, each once, and its structure.

    Raises:
        TypeError: If there is something in it that cannot be sent; names the place and the type.
    """
    tensors: list[Tensor] = []
    return tensors, _apart(value, tensors, {}, "")


def put_together(tensors: Sequence[Any], structure: Structure) -> Any:
    """The inverse of `take_apart`; `tensors` may be other ones, or anything else, in the same order."""
    kind = structure[0]
    if kind == "t":
        return tensors[structure[1]]
    if kind == "v":
        return structure[1]
    if kind in ("tuple", "list"):
        items = [put_together(tensors, item) for item in structure[1]]
        return tuple(items) if kind == "tuple" else items
    pairs = {key: put_together(tensors, item) for key, item in structure[-1]}
    return pairs if kind == "dict" else _make(structure[1], pairs)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure around changed tensors."""
    tensors, structure = take_apart(value)
    return put_together([change(tensor) for tensor in tensors], structure)


def describe(structure: Structure) -> str:
    """For messages: tensors as T, in the brackets of their containers."""
    kind = structure[0]
    if kind == "t":
        return "T"
    if kind == "v":
        return repr(structure[1])
    if kind in ("tuple", "list"):
        inner = ", ".join(describe(item) for item in structure[1])
        return f"({inner})" if kind == "tuple" else f"[{inner}]"
    inner = ", ".join(f"{key}: {describe(item)}" for key, item in structure[-1])
    return f"{{{inner}}}" if kind == "dict" else f"{structure[1].split(':')[1]}({inner})"


def _apart(value: Any, tensors: list[Tensor], numbers: dict[int, int], place: str) -> Structure:
    if isinstance(value, Tensor):
        if is_dtensor(value):
            raise TypeError(
                f"outputs{place} is a DTensor, which cannot be sent to another stage: let the last layer of a stage "
                "return plain tensors (use_local_output=True of torch's parallel styles, or to_local())"
            )
        if (number := numbers.get(id(value))) is None:
            number = numbers[id(value)] = len(tensors)
            tensors.append(value)
        return ["t", number]
    kind = type(value)
    if kind in _PLAIN:
        return ["v", value]
    if kind in (tuple, list, torch.Size):
        name = "list" if kind is list else "tuple"
        return [name, [_apart(item, tensors, numbers, f"{place}[{i}]") for i, item in enumerate(value)]]
    if (fields := _fields(value)) is None:
        raise TypeError(
            f"outputs{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent on; tensors, "
            "numbers, strings and None can, in tuples, lists, dicts, named tuples and dataclasses"
        )
    pairs = []
    for key, item in fields.items():
        if type(key) not in _PLAIN:
            raise TypeError(f"outputs{place} has a key {key!r}; only strings, numbers and None can be sent as keys")
        pairs.append([key, _apart(item, tensors, numbers, f"{place}[{key!r}]")])
    return ["dict", pairs] if kind is dict else ["object", f"{kind.__module__}:{kind.__qualname__}", pairs]


def _fields(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _make(path: str, pairs: dict[Any, Any]) -> Any:
    module, name = path.split(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    if dataclasses.is_dataclass(kind) or issubclass(kind, tuple):
        return kind(**pairs)
    return kind(pairs)
