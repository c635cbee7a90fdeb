"""Parameters whose values are there, in a bucket that has to know what is written to them.

Torch counts writes to a parameter (`p.mul_()`, `p.detach().copy_()`) in its version counter. It does not count those
through `p.data`, which has a counter of its own, nor `p.data = values`, after which the parameter lies somewhere else.
Both are events all the same: the class of such a parameter has a `data` of its own. Reading it gives the values with
one version counter that the bucket looks at; assigning it tells the bucket, which takes the values over before it needs
them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

from torch import Tensor, nn

from zero_strategy.fsdp.ownership import place_of
from zero_strategy.quantized.scales import CastByLibrary, is_asked_by_library
from zero_strategy.runtime.torch_private import callers

GET_DATA: Callable[[Tensor], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined]
"""The plain `p.data` and `p.data = values`, of any class."""
_NEW_PARAMETER = nn.Parameter.__new__.__code__  # which raises if `detach()` gives another class


def _get_data(self: nn.Parameter) -> Tensor:
    """The values, detached, with a version counter that the bucket looks at."""
    place = place_of(self)
    return GET_DATA(self) if place is None else place[0].writes.data_of(place[1])


def _set_data(self: nn.Parameter, values: Tensor) -> None:
    """Let the parameter have other values, and tell the bucket.

    Raises:
        ValueError: If they have another shape, dtype or device; names the parameter.
    """
    if isinstance(self, CastByLibrary) and is_asked_by_library(sys._getframe(1)):
        return
    place = place_of(self)
    if place is None:
        SET_DATA(self, values)
    else:
        place[0].writes.replace(place[1], values)


class Tracked:
    """Base of tracked parameters; without a tracking engine each is what its plain class makes it."""

    data = property(_get_data, _set_data)

    def detach(self) -> Tensor:
        """The values, as a plain tensor; of the parameter's own class where `nn.Parameter(p)` asks, which wants one."""
        mine = cast(nn.Parameter, self)
        values = nn.Parameter.detach(mine)
        if is_asked_by_parameter(sys._getframe(1)):
            return values.as_subclass(type(mine))
        # Torch counts writes to them with the parameter's; what is noted is that they may be brought back.
        if (place := place_of(mine)) is not None:
            place[0].writes.note_given(place[1], values)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the plain class: no engine tracks it."""
        copied: Any = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = plain_class(type(copied))
        return copied


class TrackedParameter(Tracked, nn.Parameter):
    """Never constructed: an `nn.Parameter` is one while its engine has to know of all writes to it."""


@functools.cache
def tracked_class(plain: type) -> type:
    """The class of a parameter of this class while writes to it are counted."""
    # Under the plain class's name, by which PEFT and transformers know bitsandbytes' parameters.
    return TrackedParameter if plain is nn.Parameter else type(plain.__name__, (Tracked, plain), {})


def plain_class(kind: type) -> type:
    """The class of which `kind` is the tracked one; any other class itself."""
    found: type = kind.__mro__[2] if issubclass(kind, Tracked) else kind  # after itself and `Tracked`
    return found


def track_classes(parameters: Iterable[nn.Parameter]) -> None:
    """Count writes to these from now on."""
    for parameter in parameters:
        kind = type(parameter)
        # Not by `isinstance`, which takes in `DTensor`s: writes to these are counted in what they hold.
        if issubclass(kind, nn.Parameter) and not issubclass(kind, Tracked):
            parameter.__class__ = tracked_class(kind)


def untrack_classes(parameters: Iterable[nn.Parameter]) -> None:
    """These are plain parameters again."""
    for parameter in parameters:
        parameter.__class__ = plain_class(type(parameter))


def is_asked_by_parameter(frame: FrameType | None) -> bool:
    """True if `nn.Parameter(parameter)` asks for values, which wants a result of the argument's class."""
    return any(each.f_code is _NEW_PARAMETER for each in callers(frame, 5))
