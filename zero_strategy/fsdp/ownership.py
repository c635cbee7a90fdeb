"""The one table of the process: each parameter's sharded model.

It is weak on both sides, and written when an engine takes a module over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


# Protocols, as the modules that implement them import this one.
class Writes(Protocol):
    """Writes to the full parameters of a bucket; see `UserWrites`."""

    def data_of(self, index: int) -> Tensor:
        """The values of a parameter, as `p.data` gives them; writes to them are counted."""

    def note_given(self, index: int, values: Tensor) -> None:
        """Somebody has values of a parameter that lie in the bucket."""

    def replace(self, index: int, values: Tensor) -> None:
        """Let a parameter have other values, as `p.data = values` asks."""


class NamedParameters(Protocol):
    """A bucket of parameters with names; see `ParameterBucket`."""

    names: list[str]

    @property
    def writes(self) -> Writes: ...

    def weight_for_layer(self, index: int, func: Callable[..., Any], asker: FrameType | None) -> Tensor | None:
        """The answer to a layer that asks for its weight as it casts it; None where values are wanted."""


class ParameterOwner(Protocol):
    """A sharded model as the table knows it; see `ShardedModel`."""

    def place(self, parameter: nn.Parameter) -> tuple[NamedParameters, int] | None:
        """The bucket of a parameter, and its index in it."""

    def unshard_on_demand(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Gather what a forward or a backward under way reads; False outside of both. A collective."""


# By identity: `==` of tensors compares their elements.
_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_unsharded(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a living engine shards one of `parameters`.

    Raises:
        ValueError: Saying so.
    """
    for parameter in parameters:
        if (place := place_of(parameter)) is not None:
            raise ValueError(
                f"parameter {place[0].names[place[1]]!r} is sharded by another engine already; one engine per module. "
                "zero_strategy.engine_of(module).close(gather=True), on all ranks, ends that engine and makes its "
                "module plain again: whole parameters, without hooks, for another engine or plain torch"
            )


def register(parameters: Iterable[nn.Parameter], model: ParameterOwner) -> None:
    """Remember that `model` shards `parameters`."""
    for parameter in parameters:
        # A strong one would hold the parameter in turn, through its buckets, and neither would ever go.
        _models[parameter] = ref(model)


def unregister(parameters: Iterable[nn.Parameter]) -> None:
    """Forget who shards `parameters`: nobody does any more."""
    for parameter in parameters:
        _models.pop(parameter, None)


def owner_of(parameter: nn.Parameter) -> ParameterOwner | None:
    """The sharded model that holds `parameter`, or None."""
    found: ReferenceType[ParameterOwner] | None = _models.get(parameter)
    return None if found is None else found()


def place_of(parameter: nn.Parameter) -> tuple[NamedParameters, int] | None:
    """The bucket of a parameter, and its index in it; None where no engine is left that holds it."""
    model = owner_of(parameter)
    return None if model is None else model.place(parameter)
