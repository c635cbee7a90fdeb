"""Hooks by which a watchdog follows a module: a forward is progress, and what it raises is noted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import uncompiled
from zero_strategy.watchdog.watchdog import Watchdog


def report_to_watchdog(
    watchdog: Watchdog | None, module: nn.Module, left_inconsistent: Callable[[Collection[str]], str]
) -> list[RemovableHandle]:
    """Connect a training with the watchdog of its mesh, if there is one.

    Args:
        watchdog: The watchdog.
        module: Its forwards are progress; what they raise is noted.
        left_inconsistent: See `Watchdog.add_unfinished`.

    Returns:
        The handles of its hooks on the module.
    """
    if watchdog is None:
        return []
    watchdog.add_unfinished(left_inconsistent)
    return [
        module.register_forward_pre_hook(_Before(watchdog), prepend=True),
        # Also where the forward raises, for that is what is noted.
        module.register_forward_hook(_After(watchdog), always_call=True),
    ]


class _Before(EphemeralHook):
    """A forward begins: this rank has not been stopped by what happened to it before."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._watchdog.progress()


class _After(_Before):
    """A forward ends, perhaps with an exception."""

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        error = sys.exc_info()[1]
        if error is None or error.__traceback__ is None:
            return
        # Only an exception of this call: the frame that caught it is one of the callers', some frames of torch's up.
        # One that the caller handles just now is older, and none of theirs.
        frame = sys._getframe(1)
        for _ in range(4):
            if frame is error.__traceback__.tb_frame:
                self._watchdog.note_error(error)
                return
            if frame.f_back is None:
                return
            frame = frame.f_back
