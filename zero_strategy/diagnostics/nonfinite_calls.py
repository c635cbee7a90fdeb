"""The forwards of a step, kept so that they can be run again: inputs, random numbers, gradients of the outputs.

Nothing is copied: inputs and gradients are kept by reference until the next step's first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.activation.seeds import RandomState
from zero_strategy.runtime.torch_private import uncompiled
from zero_strategy.sharding.gatherer import tensors_in


@dataclass
class Call:
    """One outermost call of a module.

    Attributes:
        name: Of the module, "" for the root.
        module: The module.
        micro_batch: Counted from 0 within the step.
        args: As called.
        kwargs: As called.
        random: Where the generators were.
        autocast: Dtype of autocast by device type.
        gradients: Of the floating-point tensors of the output, in order; None where there was none, or it was too
            large to be kept.
    """

    name: str
    module: nn.Module
    micro_batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: dict[str, torch.dtype]
    gradients: list[Tensor | None] = field(default_factory=list)

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Run it with other arguments; returns the floating-point tensors of its output."""
        with ExitStack() as stack:
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype))
            self.random.restore()
            return floating(self.module(*args, **kwargs))


def floating(value: Any) -> list[Tensor]:
    """The floating-point tensors in a value, in order."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


class CallRecorder:
    """Keeps the outermost calls of a module and its children in the present step.

    Args:
        module: The root.
        keep_bytes: Of gradients of outputs, per step.
        step: Gives the number of the present step.
    """

    def __init__(self, module: nn.Module, keep_bytes: int, step: Callable[[], int]) -> None:
        self.calls: list[Call] = []
        self._keep_bytes, self._kept = keep_bytes, 0
        self._number = step
        self._step = self._micro_batch = -1
        self._backward_seen = self._off = False
        self._open: list[nn.Module] = []
        self._hooks: list[Any] = []
        for name, child in [("", module), *module.named_children()]:
            self._hooks.append(child.register_forward_pre_hook(_Before(self, name), with_kwargs=True))
            self._hooks.append(child.register_forward_hook(self._after, always_call=True))

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def forget(self) -> None:
        """Drop what is kept."""
        self.calls, self._kept = [], 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls inside are not recorded."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        if self._off or not torch.is_grad_enabled():
            return
        self._open.append(module)
        if len(self._open) > 1:
            return
        if self._number() != self._step:
            self._step, self._micro_batch, self._backward_seen = self._number(), 0, False
            self.forget()
        elif self._backward_seen:
            self._micro_batch, self._backward_seen = self._micro_batch + 1, False
        self.calls.append(Call(name, module, self._micro_batch, args, kwargs, RandomState.now(), _autocast()))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1] is not module:
            return
        self._open.pop()
        if self._open or self._off:
            return
        call = self.calls[-1]
        for index, tensor in enumerate(floating(output)):
            call.gradients.append(None)
            if tensor.requires_grad:
                tensor.register_hook(_Keeper(self, call, index))

    def keep(self, call: Call, index: int, gradient: Tensor) -> None:
        """The gradient of an output has arrived."""
        self._backward_seen = True
        size = gradient.numel() * gradient.element_size()
        if self._kept + size <= self._keep_bytes:
            self._kept += size
            call.gradients[index] = gradient.detach()


class _Before:
    def __init__(self, recorder: CallRecorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recorder.begin(self.name, module, args, kwargs)


class _Keeper:
    def __init__(self, recorder: CallRecorder, call: Call, index: int) -> None:
        self.recorder, self.call, self.index = recorder, call, index

    def __call__(self, gradient: Tensor) -> None:
        self.recorder.keep(self.call, self.index, gradient)


def _autocast() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    }
