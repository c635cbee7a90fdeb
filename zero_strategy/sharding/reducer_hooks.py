"""Hooks of the module and of its parameters that call the reducer."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.memory.moved_states import PARAMETERS, MovedStates
from zero_strategy.runtime.torch_private import uncompiled
from zero_strategy.sharding.gatherer import InertHook


class HookedReducer(Protocol):
    """What the hooks call; see `GradientReducer`."""

    def before_forward(self) -> None: ...

    def before_gradient(self, number: int, index: int) -> None: ...

    def after_gradient(self, number: int, index: int) -> None: ...


class Watcher:
    """A forward pre-hook of the root module: unfrozen parameters get master weights, a torn backward is noticed."""

    def __init__(self, reducer: HookedReducer, moved: MovedStates) -> None:
        self.reducer, self.moved = reducer, moved

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look at the parameters before a forward that may be followed by a backward.

        Raises:
            RuntimeError: If they are on the host.
        """
        self.moved.check("a forward", (PARAMETERS,))
        if torch.is_grad_enabled():
            self.reducer.before_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()


class ParameterHook:
    """The two hooks of one parameter. They hold the reducer weakly: autograd's references are invisible to the GC."""

    def __init__(self, reducer: HookedReducer, number: int, index: int) -> None:
        self._reducer, self.number, self.index = ref(reducer), number, index

    def before(self, gradient: Tensor) -> None:
        """Runs before autograd adds to `p.grad`."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.before_gradient(self.number, self.index)

    def after(self, parameter: Tensor) -> None:
        """Runs when autograd has added to `p.grad`."""
        reducer = self._reducer()
        if reducer is not None:
            reducer.after_gradient(self.number, self.index)
