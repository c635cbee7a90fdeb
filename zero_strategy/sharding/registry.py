"""From a parameter to the engine that shards it, for calls that are given parameters alone.

The one table of the process: weak on both sides, written when an engine takes a module over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from zero_strategy.sharding.model import ShardedModel

_models: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_unsharded(parameters: Iterable[nn.Parameter]) -> None:
    """Raise if a living engine shards one of `parameters`.

    Raises:
        ValueError: Saying so.
    """
    if any(sharded_model_of(parameter) is not None for parameter in parameters):
        raise ValueError("some of these parameters are sharded by another engine already; one engine per module")


def register(parameters: Iterable[nn.Parameter], model: ShardedModel) -> None:
    """Remember that `model` shards `parameters`."""
    for parameter in parameters:
        _models[parameter] = ref(model)


def sharded_model_of(parameter: nn.Parameter) -> ShardedModel | None:
    """The sharded model that holds `parameter`, or None."""
    found: ReferenceType[ShardedModel] | None = _models.get(parameter)
    return None if found is None else found()
