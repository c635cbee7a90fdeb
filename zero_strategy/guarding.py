"""Reports of training to the guard: that a forward begins, that it raised, and what else an exception has torn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from zero_strategy.distributed.guard import Guard
from zero_strategy.runtime.torch_private import uncompiled
from zero_strategy.sharding.gatherer import InertHook


def tell_guard(guard: Guard | None, module: nn.Module, left_torn: Callable[[Collection[str]], str]) -> None:
    """Connect a training with the guard of its mesh, if there is one.

    Args:
        guard: The guard.
        module: Its forwards are progress; what they raise is noted.
        left_torn: See `Guard.add_unfinished`.
    """
    if guard is None:
        return
    guard.add_unfinished(left_torn)
    module.register_forward_pre_hook(_Before(guard), prepend=True)
    module.register_forward_hook(_After(guard), always_call=True)


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
