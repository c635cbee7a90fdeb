"""Named ranges in a profiler's timeline: NVTX on a GPU, torch's `record_function` elsewhere.

    ranges = NvtxRanges(enabled=True)
    ranges.push("forward"); ...; ranges.pop("forward")        # a pop names what it ends, so that a mistake shows
    @ranges.decorator()                                       # the name is the function's own

Switched off, nothing is pushed and no name is made.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class NvtxRanges:
    """A switch, and per thread a stack of open ranges.

    Args:
        enabled: Whether ranges are made.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._local = threading.local()

    @property
    def messages(self) -> list[str]:
        """Names of this thread's open ranges, the outermost first."""
        return [message for message, _ in self._stack]

    def configure(self, enabled: bool) -> None:
        """Switch on or off. Ranges that are open stay open, and end with their pop all the same.

        Args:
            enabled: Whether ranges are made.
        """
        self.enabled = enabled

    def push(self, msg: str | None = None, suffix: str | None = None) -> None:
        """Open a range in the innermost open one.

        Args:
            msg: Its name; default: module and name of the calling function.
            suffix: Is added after a dot.
        """
        if self.enabled:
            self._open(_joined(msg or _nvtx_range_get_func_path(), suffix))

    def pop(self, msg: str | None = None, suffix: str | None = None) -> None:
        """End the innermost range.

        Args:
            msg: The name that it must have; default: module and name of the calling function.
            suffix: Is added after a dot.

        Raises:
            RuntimeError: If no range is open.
            ValueError: If the innermost one has another name; it stays open.
        """
        if not self.enabled and not self._stack:
            return
        name = _joined(msg or _nvtx_range_get_func_path(), suffix)
        if not self._stack:
            raise RuntimeError(f"pop of range {name!r}: no range is open in this thread")
        if self._stack[-1][0] != name:
            raise ValueError(f"pop of range {name!r}, but the innermost open one is {self._stack[-1][0]!r}")
        self._close()

    def decorator(self, message: str | None = None, color: str | None = None) -> Callable[[F], F]:
        """A range around each call of a function, which ends also when it raises.

        Args:
            message: The range's name; default: module and name of the function.
            color: Of the range, where the package `nvtx` is installed beside a GPU; nothing else knows colours.
        """

        def decorate(function: F) -> F:
            name = message or _nvtx_decorator_get_func_path(function)

            @functools.wraps(function)
            def ranged(*args: Any, **kwargs: Any) -> Any:
                if not self.enabled:  # asked at each call, so that it may be switched on later
                    return function(*args, **kwargs)
                depth = len(self._stack)
                self._open(name, color)
                try:
                    return function(*args, **kwargs)
                finally:
                    while len(self._stack) > depth:  # the function's own, too, that an exception has left open
                        self._close()

            return ranged  # type: ignore[return-value]

        return decorate

    @property
    def _stack(self) -> list[tuple[str, AbstractContextManager[Any]]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[str, AbstractContextManager[Any]]] = self._local.stack
        return stack

    def _open(self, name: str, color: str | None = None) -> None:
        opened = _range(name, color)
        opened.__enter__()
        self._stack.append((name, opened))

    def _close(self) -> None:
        self._stack.pop()[1].__exit__(None, None, None)


def _nvtx_range_get_func_path() -> str:
    """Module and name of the function that called the caller, joined by a dot."""
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    return f"{frame.f_globals.get('__name__', '__main__')}.{frame.f_code.co_name}"


def _nvtx_decorator_get_func_path(func: Callable[..., Any]) -> str:
    """Module and name of a function, joined by a dot."""
    return f"{func.__module__}.{getattr(func, '__name__', type(func).__name__)}"


def _joined(message: str, suffix: str | None) -> str:
    return f"{message}.{suffix}" if suffix else message


def _range(name: str, color: str | None) -> AbstractContextManager[Any]:
    """What shows a range in the profiler that this machine has."""
    if not torch.cuda.is_available():
        return torch.profiler.record_function(name)
    if color is not None and importlib.util.find_spec("nvtx") is not None:
        annotate: AbstractContextManager[Any] = importlib.import_module("nvtx").annotate(message=name, color=color)
        return annotate
    ranged: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
    return ranged
