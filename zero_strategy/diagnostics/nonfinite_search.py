"""Where a value first is not finite in one call that is run again: forward, and backward from the outputs' gradients.

Parameters are frozen meanwhile, so that no gradient of theirs is computed or reduced; gradients flow back to
floating-point inputs, or to the first such outputs of modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.diagnostics.nonfinite_calls import Call, floating
from zero_strategy.runtime.torch_private import tree_map

FINITE, INF, NAN = 0, 1, 2
KINDS = ("finite", "inf", "nan")


@dataclass(frozen=True)
class Origin:
    """Where a value that is not finite came from.

    Attributes:
        micro_batch: Of which micro-batch.
        module: In which module's own code.
        direction: "forward" or "backward".
        kind: "inf" or "nan".
        what: In words.
    """

    micro_batch: int
    module: str
    direction: str
    kind: str
    what: str


@dataclass
class _Visit:
    """One call of a module in a replay."""

    name: str
    inputs: int = FINITE
    outputs: int = FINITE
    weight: str = ""
    grad_inputs: int = FINITE
    grad_outputs: int = FINITE
    arrived: bool = False
    parent: _Visit | None = None


def state_of(tensors: list[Tensor]) -> int:
    """NAN if there is one, else INF if there is one, else FINITE."""
    found = FINITE
    for tensor in tensors:
        values = tensor.detach()
        if not bool(torch.isfinite(values).all()):
            found = max(found, NAN if bool(values.isnan().any()) else INF)
    return found


class Replay:
    """Hooks on all modules for the time of a replay.

    Args:
        root: Whose names count.
    """

    def __init__(self, root: nn.Module) -> None:
        self.names = {module: name for name, module in root.named_modules()}
        self.root = root

    # ---- forward ----

    def forward(self, call: Call) -> Origin | None:
        """Where a forward first makes what is not finite, if its outputs are not."""
        visits: list[_Visit] = []
        open_visits: list[_Visit] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            weights = {n: p for n, p in module.named_parameters(recurse=False) if p.is_floating_point()}
            bad = next((name for name, weight in weights.items() if state_of([weight])), "")
            parent = open_visits[-1] if open_visits else None
            inputs = state_of(floating((args, kwargs)))
            open_visits.append(_Visit(self.names[module], inputs, weight=bad, parent=parent))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            visit = open_visits.pop()
            visit.outputs = state_of(floating(output))
            visits.append(visit)

        with torch.no_grad(), self._kept_buffers(), self._hooked(before, after):
            end = state_of(call.again(call.args, call.kwargs))
        if end == FINITE:
            return None
        visit = next(visit for visit in visits if visit.outputs >= end)  # the inner one ends first
        if end == NAN and visit.inputs == INF:  # made of an inf, and that is where it began
            end, visit = INF, next(visit for visit in visits if visit.outputs)
        return _origin(call, visit, end)

    # ---- backward ----

    def loss(self, call: Call) -> Origin | None:
        """Whether what came to the outputs in the backward was not finite. Runs nothing."""
        state = state_of([gradient for gradient in call.gradients if gradient is not None])
        if not state:
            return None
        what = f"the gradient of the output of {call.name or 'the model'} is not finite already"
        return Origin(call.micro_batch, "(loss)", "backward", KINDS[state], what)

    def backward(self, call: Call) -> Origin | None:
        """Where a backward first makes what is not finite, for gradients of the outputs as they were (else ones)."""
        visits, leaves = list[_Visit](), list[Tensor]()

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            visit = _Visit(self.names[module])
            visits.append(visit)

            def own(value: Any) -> Any:
                if not isinstance(value, Tensor) or not value.requires_grad:
                    return value
                view = value.view_as(value)  # another reader of the tensor has another one
                view.register_hook(lambda gradient: _note(visit, "grad_inputs", gradient))
                return view

            return tree_map(own, args), tree_map(own, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            visit = next(visit for visit in reversed(visits) if visit.name == self.names[module])
            for tensor in floating(output):
                if not tensor.requires_grad and tensor.is_leaf:
                    tensor.requires_grad_(True)
                    leaves.append(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: _note(visit, "grad_outputs", gradient))

        args, kwargs = tree_map(lambda value: _leaf(value, leaves), (call.args, call.kwargs))
        with torch.enable_grad(), self._kept_buffers(), self._frozen(), self._hooked(before, after):
            outputs = call.again(args, kwargs)
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, _gradients_of(call, outputs), strict=True)
                if output.requires_grad and gradient is not None
            ]
            if pairs and leaves:
                torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        found = [visit for visit in visits if visit.arrived and visit.grad_inputs and not visit.grad_outputs]
        if not found:
            return None
        deepest = max(found, key=lambda visit: (visit.name.count(".") + bool(visit.name), visits.index(visit)))
        return Origin(call.micro_batch, deepest.name, "backward", KINDS[deepest.grad_inputs], "from finite gradients")

    # ---- around both ----

    @contextmanager
    def _hooked(self, before: Any, after: Any) -> Iterator[None]:
        hooks = []
        for module in self.names:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """Running statistics are those of one forward."""
        before = [(buffer, buffer.clone()) for buffer in self.root.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in before:
                    buffer.copy_(values)

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        trainable = [parameter for parameter in self.root.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


def _origin(call: Call, visit: _Visit, level: int) -> Origin:
    """Whose code made it: the module's own, or that of one around it, which gave it such inputs."""
    if visit.weight:
        return Origin(call.micro_batch, visit.name, "forward", KINDS[level], f"its {visit.weight} is not finite")
    if visit.inputs < level:
        return Origin(call.micro_batch, visit.name, "forward", KINDS[level], "from finite inputs")
    while visit.parent is not None and visit.parent.inputs >= level:
        visit = visit.parent
    if visit.parent is None:
        return Origin(call.micro_batch, visit.name, "forward", KINDS[level], "its inputs are not finite")
    what = f"in its own code, before {visit.name}"
    return Origin(call.micro_batch, visit.parent.name, "forward", KINDS[level], what)


def _note(visit: _Visit, side: str, gradient: Tensor) -> None:
    setattr(visit, side, max(getattr(visit, side), state_of([gradient])))
    visit.arrived = visit.arrived or side == "grad_outputs"


def _leaf(value: Any, leaves: list[Tensor]) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    leaves.append(value.detach().requires_grad_(True))
    return leaves[-1]


def _gradients_of(call: Call, outputs: list[Tensor]) -> list[Tensor | None]:
    """As they were; ones where none was kept at all."""
    if len(call.gradients) != len(outputs) or all(gradient is None for gradient in call.gradients):
        return [torch.ones_like(output) for output in outputs]
    return list(call.gradients)
