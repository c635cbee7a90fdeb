"""What an engine's guard is told of training: that a forward begins, that it raised, what an exception left torn."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from zero_strategy.distributed.guard import Guard
from zero_strategy.sharding.gatherer import InertHook
from zero_strategy.uncompiled import uncompiled

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


def tell_guard(engine: ZeroEngine) -> None:
    """Connect an engine with the guard of its mesh, if there is one."""
    guard = engine.mesh.guard
    if guard is None:
        return
    engine.module.register_forward_pre_hook(_Before(guard), prepend=True)
    engine.module.register_forward_hook(_After(guard), always_call=True)
    torn = weakref.WeakMethod(engine.left_torn)

    def left_torn(phases: Collection[str]) -> str:
        method = torn()
        return "" if method is None else method(phases)

    guard.torn = left_torn


class _Before:
    """A forward begins: this rank has not been stopped by what befell it before."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._guard.progress()

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()


class _After(_Before):
    """A forward ends, perhaps with an exception."""

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        error = sys.exc_info()[1]
        if error is None or error.__traceback__ is None:
            return
        frame = sys._getframe(1)  # of the call that caught it; an exception that the caller handles is older
        for _ in range(4):
            if frame is error.__traceback__.tb_frame:
                self._guard.note_error(error)
                return
            if frame.f_back is None:
                return
            frame = frame.f_back
