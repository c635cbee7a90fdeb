"""Megatron's diagnostics: async tasks, NVTX ranges, logging by rank, the straggler singleton, a check of replicas.

An exception in an asyncio task waits for somebody who awaits the task; nobody may. So it is logged where it happens,
and goes on from there as always.

`NvtxRanges` are NVTX ranges on a GPU, and torch's `record_function` elsewhere.

    ranges = NvtxRanges(enabled=True)
    ranges.push("forward"); ...; ranges.pop("forward")        # a pop names what it ends, so that a mistake shows
    @ranges.decorator()                                       # the name is the function's own

Switched off, nothing is pushed and no name is made.

A message is logged from one rank, or once per pipeline stage.

The straggler singleton, also known as `__straggler__`, is one per process; `straggler.StragglerDetector` is an ordinary
class.

The check of replicas compares the parameters of data-parallel replicas, bit by bit.

It compares what ranks hold alike: full parameters at stages 0 to 2 and of modules that are not sharded; at stage 3 a
rank's shards with those of the ranks that hold the same ones (`mesh.replicate`). Only digests are gathered, once.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import xxhash
from torch import Tensor, nn

import zero_strategy.compat.megatron.straggler as straggler
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.comm.store import gather_everywhere
from zero_strategy.compat.megatron.groups import get_pg_rank
from zero_strategy.fsdp.dtensor import held_by
from zero_strategy.fsdp.model import sharded_model_of
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.runtime.terminal import report

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    """Tool that shows a range in the profiler that this machine has."""
    if not torch.cuda.is_available():
        return torch.profiler.record_function(name)
    if color is not None and importlib.util.find_spec("nvtx") is not None:
        annotate: AbstractContextManager[Any] = importlib.import_module("nvtx").annotate(message=name, color=color)
        return annotate
    ranged: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
    return ranged


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`logger.log(*args, **kwargs)` on one rank; without a process group on this one, whichever it is.

    Args:
        logger: Whose.
        args: The level, the message, and what is put into it.
        rank: The global rank that writes.
        kwargs: Of `Logger.log`.
    """
    if _listens(logger, args) and (not _distributed() or world_rank() == rank):
        logger.log(*args, **kwargs)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> None:
    """`logger.log(*args, **kwargs)` on the ranks that are first in both groups: one per pipeline stage.

    Args:
        logger: Whose.
        args: The level, the message, and what is put into it.
        tp_group: Tensor-parallel ranks of this one; None: none but itself.
        dp_cp_group: Data- and context-parallel ranks of this one; None: none but itself.
        kwargs: Of `Logger.log`.
    """
    if _listens(logger, args) and get_pg_rank(tp_group) == 0 and get_pg_rank(dp_cp_group) == 0:
        logger.log(*args, **kwargs)


def _listens(logger: logging.Logger, arguments: tuple[Any, ...]) -> bool:
    """True if the level is wanted; asked first, as it costs least. What is no level the logger refuses itself."""
    return not arguments or not isinstance(arguments[0], int) or logger.isEnabledFor(arguments[0])


def _distributed() -> bool:
    from zero_strategy.comm.process_group import has_process_group

    return has_process_group() and world_size() > 1


class StragglerDetector(straggler.StragglerDetector):
    """The one detector of the process: a second construction gives it again, as it is."""

    _only: StragglerDetector | None = None

    def __new__(cls) -> StragglerDetector:
        """The one instance."""
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __init__(self) -> None:
        if "_configured" not in self.__dict__:
            super().__init__()


__straggler__ = StragglerDetector()
"""The instance."""


@dataclass(frozen=True)
class ReplicaDifference:
    """One parameter that replicas do not hold alike.

    Attributes:
        name: Of the parameter.
        groups: Data-parallel ranks that hold the same values together; those with replica 0 come first.
    """

    name: str
    groups: list[list[int]]

    @property
    def odd(self) -> list[int]:
        """The ranks that are not with most of them; of two equal halves, those that are not with the first."""
        most = max(self.groups, key=len)
        return sorted(rank for group in self.groups if group is not most for rank in group)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.odd))
        return f"{self.name}: rank(s) {ranks} of {' | '.join(' '.join(map(str, group)) for group in self.groups)}"


@dataclass(frozen=True)
class ReplicaReport:
    """Result of a comparison; the same on every rank.

    Attributes:
        compared: How many parameters (at stage 3, parts of them on this rank's replicas) have more than one holder.
        differences: Those that are not equal.
    """

    compared: int
    differences: list[ReplicaDifference]

    def matches_first(self, rank: int) -> bool:
        """True if a rank holds what replica 0 of it holds."""
        holding = [each for each in self.differences if any(rank in group for group in each.groups)]
        return all(rank in each.groups[0] for each in holding)

    def __str__(self) -> str:
        if not self.differences:
            return f"replicas are equal ({self.compared} compared)"
        return "\n".join(["replicas differ:", *(f"  {difference}" for difference in self.differences)])


def check_param_hashes_across_dp_replicas(model: nn.Module | Sequence[nn.Module], cross_check: bool = False) -> bool:
    """True if this rank's parameters are those of data-parallel replica 0. A collective.

    Args:
        model: A module, or the chunks of one.
        cross_check: Whether all replicas' are equal instead: the same answer on every rank.

    Returns:
        Whether they are; `replica_report` says which are not.
    """
    report, rank = _compared(model)
    return not report.differences if cross_check else report.matches_first(rank)


def replica_report(model: nn.Module | Sequence[nn.Module]) -> ReplicaReport:
    """Parameters that replicas hold differently, and which ranks. A collective."""
    return _compared(model)[0]


def _compared(model: nn.Module | Sequence[nn.Module]) -> tuple[ReplicaReport, int]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    mesh = next((found for chunk in chunks if (found := _mesh_of(chunk)) is not None), None)
    mine: dict[str, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk {number}: " if len(chunks) > 1 else ""
        mine |= {prefix + name: value for name, value in _digests(chunk)}
    everyone: list[tuple[int, dict[str, str]]]
    if mesh is None:
        everyone = [(0, part) for part in gather_everywhere(mine)]
        rank = world_rank()
    else:
        everyone = mesh.control.all_gather_objects((mesh.shard_rank, mine))
        rank = mesh.rank
    return _report(everyone), rank


def _report(everyone: Sequence[tuple[int, dict[str, str]]]) -> ReplicaReport:
    """Make the report from each rank's column of the mesh and digests. Full parameters say so, and have one column."""
    holders: dict[tuple[int, str], dict[str, list[int]]] = {}
    for rank, (column, part) in enumerate(everyone):
        for name, digest in part.items():
            shared, _, value = digest.partition(" ")
            key = (column if shared == "slice" else -1, name)
            holders.setdefault(key, {}).setdefault(value, []).append(rank)
    held = {key: list(values.values()) for key, values in holders.items()}
    several = {key: groups for key, groups in held.items() if sum(map(len, groups)) > 1}
    missing = {
        name: [present, sorted(set(range(len(everyone))) - set(present))]
        for (column, name), groups in held.items()
        if len(present := sorted(chain(*groups))) < len(everyone) and column < 0
    }
    found = [ReplicaDifference(name, groups) for (_, name), groups in several.items() if len(groups) > 1]
    found += [ReplicaDifference(f"{name} (not on all ranks)", groups) for name, groups in missing.items()]
    return ReplicaReport(len(several), found)


def _mesh_of(module: nn.Module) -> Mesh | None:
    for parameter in module.parameters():
        if (model := sharded_model_of(parameter)) is not None:
            return model.mesh
    return None


def _digests(module: nn.Module) -> Iterator[tuple[str, str]]:
    followed: set[int] = set()
    for name, parameter in module.named_parameters():
        model = sharded_model_of(parameter)
        place = None if model is None else model.place(parameter)
        if model is not None and id(model) not in followed:
            followed.add(id(model))
            model.follow_edits()
        if place is None or not place[0].placement.shard_parameters:
            yield name, f"whole {_digest(name, parameter.shape, held_by(parameter))}"
        elif (values := _slice_of(*place)) is not None:
            yield name, f"slice {_digest(name, parameter.shape, values)}"


def _slice_of(bucket: ParameterBucket, index: int) -> Tensor | None:
    for piece in bucket.slice_pieces:
        if piece.index == index and piece.numel:
            return bucket.shard.read(piece.offset, piece.offset + piece.numel)
    return None


def _digest(name: str, shape: torch.Size, values: Tensor) -> str:
    """A digest of raw bytes: NaNs and zeros of different bits differ."""
    raw = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_128(f"{name} {tuple(shape)} {values.dtype} ".encode())
    if raw.size:
        digest.update(raw.data)
    return digest.hexdigest()
