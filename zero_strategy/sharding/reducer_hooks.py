"""What calls the reducer, and whom it calls: hooks of the module and of its parameters; users of what is reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.memory.moved_states import PARAMETERS, MovedStates
from zero_strategy.runtime.uncompiled import uncompiled
from zero_strategy.sharding.gatherer import InertHook

if TYPE_CHECKING:
    from zero_strategy.sharding.gradients import GradientBucket


class ReductionWatcher(Protocol):
    """Somebody who uses gradients as soon as they are reduced."""

    def backward_begins(self) -> None:
        """A backward begins that will reduce gradients."""

    def reduced(self, gradients: GradientBucket) -> None:
        """The gradients of a bucket are reduced, and will stay as they are unless more come late in this backward.

        Called while the backward runs, and at its end again for all buckets that any rank touched.
        """

    def reset(self) -> None:
        """Gradients were dropped; wait for nothing that was to come."""


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
