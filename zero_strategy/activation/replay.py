"""A unit's forward that can be run again: from what was kept of its inputs, and without a trace in its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_strategy.runtime.torch_private import buffers_of, version_of


class Replay:
    """A forward, the first time with the caller's own arguments, then with the tensors that were kept.

    The tensors are arguments of their own, so that whoever looks at what autograd saves sees them, whether they were
    given by position, by name or in a container. Lists and dicts are made anew for a replay: what a forward appends to
    one is appended once.

    Args:
        forward: What is run.
        args: Its arguments.
        kwargs: Its arguments by name.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.tensors: list[Tensor] = []
        self._shape = _take_out((args, kwargs), self.tensors)

    def take_tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order; they are not held here any longer."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            return self._forward(*args, **kwargs)
        return self.again(tensors)

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The forward with other tensors in the places of those that it was given."""
        args, kwargs = _put_back(self._shape, tensors)
        return self._forward(*args, **kwargs)


class _Place(NamedTuple):
    """Stands for a tensor."""

    number: int


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _rebuilt(value, lambda item: _take_out(item, tensors))


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    if type(value) is _Place:
        return tensors[value.number]
    return _rebuilt(value, lambda item: _put_back(item, tensors))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A plain container with its items changed; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)([change(item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(item) for item in value])
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return value


class Around:
    """Contexts that are made anew and entered together, each time that this one is entered.

    Args:
        make: Makes one each, the outermost first.
    """

    def __init__(self, *make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._make:
                stack.enter_context(make())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool:
        return bool(self._open.pop().__exit__(*error))


class BufferState(NamedTuple):
    """A buffer before a forward."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None


class BufferStates:
    """The buffers of a unit that its forward changes, such as running statistics of a norm.

    A replay begins with the values from before the forward, and what it writes is dropped. Which buffers change is
    learnt from the first forward, by their values (a batch norm moves no version counter), so that others are not
    copied later.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[tuple[int, str]] = set()
        self._learning = True

    def before(self) -> list[BufferState]:
        """To be called before a forward."""
        return [
            BufferState(owner, name, buffer, version_of(buffer), self._copy(owner, name, buffer))
            for owner in self._module.modules()
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
        return buffer.detach().clone() if self._learning or (id(owner), name) in self._changing else None

    def after(self, states: Sequence[BufferState]) -> list[BufferState]:
        """To be called after it; gives those that it changed."""
        self._changing |= {(id(state.owner), state.name) for state in states if self._has_changed(state)}
        self._learning = False
        return [s for s in states if s.copy is not None and (id(s.owner), s.name) in self._changing]

    def _has_changed(self, state: BufferState) -> bool:
        if buffers_of(state.owner).get(state.name) is not state.buffer or version_of(state.buffer) != state.version:
            return True
        return self._learning and state.copy is not None and not torch.equal(state.copy, state.buffer)

    @staticmethod
    @contextmanager
    def restored(changed: Sequence[BufferState]) -> Iterator[None]:
        """Inside, modules have the values of before the forward; outside nothing of what was written."""
        present = [buffers_of(state.owner)[state.name] for state in changed]
        for state in changed:
            assert state.copy is not None
            buffers_of(state.owner)[state.name] = state.copy.clone()
        try:
            yield
        finally:
            for state, buffer in zip(changed, present, strict=True):
                buffers_of(state.owner)[state.name] = buffer
