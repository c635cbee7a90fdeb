"""From a parameter to the engine that shards it, for calls that are given parameters alone.

The one table of the process: weak on both sides, written when an engine takes a module over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import ReferenceType, ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Named(Protocol):
    """A bucket of parameters with names."""

    names: list[str]


class ParameterOwner(Protocol):
    """A sharded model as the table knows it; see `ShardedModel`.

    Attributes:
        told_of_reads: The user has been warned of a read of a released parameter.
    """

    told_of_reads: bool

    def place(self, parameter: nn.Parameter) -> tuple[Named, int] | None:
        """The bucket of a parameter, and its index in it."""


_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_unsharded(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a living engine shards one of `parameters`.

    Raises:
        ValueError: Saying so.
    """
    if any(owner_of(parameter) is not None for parameter in parameters):
        raise ValueError("some of these parameters are sharded by another engine already; one engine per module")


def register(parameters: Iterable[nn.Parameter], model: ParameterOwner) -> None:
    """Remember that `model` shards `parameters`."""
    for parameter in parameters:
        _models[parameter] = ref(model)


def owner_of(parameter: nn.Parameter) -> ParameterOwner | None:
    """The sharded model that holds `parameter`, or None."""
    found: ReferenceType[ParameterOwner] | None = _models.get(parameter)
    return None if found is None else found()
