"""Coroutines in tasks of their own: failures that show, and how long they live.

An exception in an asyncio task waits for somebody who awaits the task; nobody may. So it is logged where it happens,
and goes on from there as always.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar, overload

from zero_strategy.runtime.reporting import report

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


class AsyncTasks:
    """An event loop for code without one, and statistics of traced coroutines.

    Attributes:
        loop: The loop that `get_asyncio_loop` has made, if it had to.
        stats: By function: how many calls of it ended, and their milliseconds together (with `verbose` only).
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stats: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def get_asyncio_loop(self, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
        """The given loop; else the running one; else one that is made once and set as this thread's.

        Args:
            loop: Is returned.
        """
        if loop is not None:
            return loop
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            if self.loop is None or self.loop.is_closed():
                self.loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self.loop)
            return self.loop

    @overload
    def trace_async_exceptions(self, func: F, *, verbose: bool = False) -> F: ...
    @overload
    def trace_async_exceptions(self, func: None = None, *, verbose: bool = False) -> Callable[[F], F]: ...
    def trace_async_exceptions(self, func: Callable[..., Any] | None = None, *, verbose: bool = False) -> Any:
        """Decorates coroutines, and asynchronous generators: an exception is logged with its traceback, and raised.

        Args:
            func: The function; None: the result decorates.
            verbose: Log how long a call took and what is usual, at the 1st, 10th, 100th, ... call of a function.

        Raises:
            TypeError: If it is neither `async def` nor an asynchronous generator.
        """
        if func is None:
            return functools.partial(self.trace_async_exceptions, verbose=verbose)
        original = func
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._traced(_name(original), verbose):
                    return await original(*args, **kwargs)

            return coroutine
        if inspect.isasyncgenfunction(original):

            @functools.wraps(original)
            async def generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                with self._traced(_name(original), verbose):
                    async with aclosing(original(*args, **kwargs)) as values:
                        async for value in values:
                            yield value

            return generator
        raise TypeError(f"trace_async_exceptions decorates async functions, not {_name(original)}")

    @contextmanager
    def _traced(self, name: str, verbose: bool) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception:  # a cancelled task has not failed
            logger.exception("exception in the asynchronous function %s", name)
            raise
        finally:
            if verbose:
                self._count(name, (time.perf_counter() - began) * 1e3)

    def _count(self, name: str, milliseconds: float) -> None:
        entry = self.stats[name]
        entry[0] += 1
        entry[1] += milliseconds
        count = int(entry[0])
        if str(count).strip("0") == "1":  # a power of ten
            report(
                logger,
                "%s ended after %.3f ms; %d calls so far, of %.3f ms on average",
                name,
                milliseconds,
                count,
                entry[1] / count,
            )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
