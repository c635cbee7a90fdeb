"""The parameter that a scale, or another part of a quantised weight, is."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

from zero_strategy.runtime.torch_private import of_class, target_of_to


class Scale(nn.Parameter):
    """A scale of a quantised weight: frozen, and of its own dtype when a module is cast, as the library leaves it."""

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        """See torch; a module's cast moves the scale alone."""
        if not _is_asked_by_module(sys._getframe(1)):
            return super().to(*arguments, **keywords)
        device, _, non_blocking = target_of_to(*arguments, **keywords)
        return super().to(self.device if device is None else device, non_blocking=non_blocking)

    def float(self) -> Any:
        """See torch; a module's cast gives the scale itself."""
        return self if _is_asked_by_module(sys._getframe(1)) else super().float()

    def double(self) -> Any:
        """See torch; a module's cast gives the scale itself."""
        return self if _is_asked_by_module(sys._getframe(1)) else super().double()

    def half(self) -> Any:
        """See torch; a module's cast gives the scale itself."""
        return self if _is_asked_by_module(sys._getframe(1)) else super().half()

    def bfloat16(self) -> Any:
        """See torch; a module's cast gives the scale itself."""
        return self if _is_asked_by_module(sys._getframe(1)) else super().bfloat16()


def _is_asked_by_module(frame: FrameType) -> bool:
    """True if `nn.Module.to`, `.half()` or one of their like asks."""
    return frame.f_globals.get("__name__") == nn.Module.__module__


def scale(values: Tensor) -> Scale:
    """A scale that has these values, in their memory."""
    return of_class(Scale, values.detach())
