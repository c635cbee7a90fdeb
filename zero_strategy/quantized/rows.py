"""An int8 layer's rows, which its library keeps beside the weight, found in the weight itself.

A tensor in their place would keep the whole of what is released.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import Tensor

_WEIGHT = "_weight"


def _get_rows(self: Any) -> Tensor | None:
    weight = vars(self).get(_WEIGHT)
    # Not the weight, whose class in the library has a `to` of fewer arguments than a tensor's.
    found: Tensor | None = vars(self).get("CB") if weight is None else weight.detach()
    return found


def _set_rows(self: Any, rows: Tensor | None) -> None:
    vars(self).pop(_WEIGHT, None)  # another weight, such as one with an adapter merged into it
    vars(self)["CB"] = rows


def _copied(self: Any, memo: dict[int, Any]) -> Any:
    kind: Any = type(self)
    made = memo[id(self)] = kind.__new__(kind)
    vars(made).update(copy.deepcopy(vars(self), memo))
    return made


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """A state of the library's own class, with its rows: nobody can import a class that is made here."""
    values = {key: value for key, value in vars(self).items() if key != _WEIGHT}
    return type(self).__mro__[1], (), {**values, "CB": self.CB}


@functools.cache
def _following_class(kind: type) -> type:
    """The class of an int8 layer's state whose `CB` is what the weight has now."""
    members: dict[str, Any] = {"CB": property(_get_rows, _set_rows), "__deepcopy__": _copied, "__reduce_ex__": _reduced}
    return type(f"Following{kind.__name__}", (kind,), members)


def follow_weight(layer: Any) -> None:
    """Let a layer find its rows in its weight."""
    if _WEIGHT not in vars(layer.state):
        kind: Any = type(layer.state)
        layer.state.__class__ = _following_class(kind if not hasattr(kind, "__deepcopy__") else kind.__mro__[1])
    vars(layer.state)["CB"] = layer.weight.CB = None
    vars(layer.state)[_WEIGHT] = layer.weight


def follow_no_weight(layer: Any) -> None:
    """Undo `follow_weight`."""
    if vars(layer.state).pop(_WEIGHT, None) is not None:
        layer.state.__class__ = type(layer.state).__mro__[1]
        layer.state.CB = layer.weight.data
