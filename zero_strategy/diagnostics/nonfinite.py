"""The first value that is not finite, by step, rank, micro-batch and module.

Nothing is copied: inputs and gradients are kept by reference until the next step's first forward.

Parameters are frozen meanwhile, so that no gradient of theirs is computed or reduced; gradients flow back to
floating-point inputs, or to the first such outputs of modules.

    watch = NonFiniteWatch(engine)           # or raises=True: NonFiniteError on all ranks, before the step
    ...
    engine.clip_grad_norm_(1.0)              # the norm's flag is what is looked at: no pass of its own
    watch.found                              # the last that was found

Only once a norm's flag says so, the forwards of the step are run again with hooks on all modules, on all ranks alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.activation.rng import RandomState, kept_random_state
from zero_strategy.diagnostics.recorder import get_autocast_status
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.unshard import tensors_in
from zero_strategy.optim.grad_norm import GradientStats
from zero_strategy.runtime.torch_private import tree_map, uncompiled


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
        random, autocast = RandomState.now(), get_autocast_status()
        self.calls.append(Call(name, module, self._micro_batch, args, kwargs, random, autocast))

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
                tensor.register_hook(partial(self._keep, call, index))

    def _keep(self, call: Call, index: int, gradient: Tensor) -> None:
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


FINITE, INF, NAN = 0, 1, 2
KINDS = ("finite", "inf", "nan")


@dataclass(frozen=True)
class Origin:
    """Origin of a value that is not finite.

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
        """Place in a forward that first makes values that are not finite, if its outputs are not."""
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
        """True if what came to the outputs in the backward was not finite. Runs nothing."""
        state = state_of([gradient for gradient in call.gradients if gradient is not None])
        if not state:
            return None
        what = f"the gradient of the output of {call.name or 'the model'} is not finite already"
        return Origin(call.micro_batch, "(loss)", "backward", KINDS[state], what)

    def backward(self, call: Call) -> Origin | None:
        """Place in a backward that first makes a value that is not finite, for gradients of the outputs they had."""
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
    """Owner of the code that made it: the module's own, or that of one around it, which gave it such inputs."""
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
    """Gradients as they were; ones where none was kept at all."""
    if len(call.gradients) != len(outputs) or all(gradient is None for gradient in call.gradients):
        return [torch.ones_like(output) for output in outputs]
    return list(call.gradients)


_log = logging.getLogger(__name__)
KEEP_BYTES = 64 << 20


@dataclass(frozen=True)
class NonFinite:
    """Findings of a step; the same on all ranks.

    Attributes:
        step: Counted from 0.
        parameters: Whose gradients hold values that are not finite, and how many.
        rank: Where it arose first, None if that was not found.
        origin: Where there; None likewise.
    """

    step: int
    parameters: dict[str, int]
    rank: int | None = None
    origin: Origin | None = None

    def __str__(self) -> str:
        names = ", ".join(list(self.parameters)[:4]) + (", ..." if len(self.parameters) > 4 else "")
        text = f"step {self.step}: gradients are not finite ({names})"
        if self.origin is None:
            return f"{text}; running the step again showed no module from which that comes"
        origin = self.origin
        module = origin.module or "the model itself"
        return (
            f"{text}; first {origin.kind}: rank {self.rank}, micro-batch {origin.micro_batch}, {origin.direction} of "
            f"{module}, {origin.what}"
        )


class NonFiniteError(RuntimeError):
    """Gradients are not finite; `found` says where that came from."""

    def __init__(self, found: NonFinite) -> None:
        self.found = found
        super().__init__(str(found))


class NonFiniteWatch:
    """Looks at the flag of every norm of gradients that an engine takes. All ranks make one.

    Args:
        engine: The engine. What is called is its module, or children of it.
        raises: Raise instead of logging.
        keep_bytes: Gradients of outputs that are kept per step, by reference, for running the backward again; with
            larger ones it is run with ones.

    Attributes:
        found: What was found last.
    """

    def __init__(self, engine: ZeroEngine, *, raises: bool = False, keep_bytes: int = KEEP_BYTES) -> None:
        self.engine, self.raises = engine, raises
        self.found: NonFinite | None = None
        self._recorder = CallRecorder(engine.module, keep_bytes, step=lambda: engine.steps.taken)
        engine.gradient_watchers.append(self._look)

    def close(self) -> None:
        """Look no more."""
        self.engine.gradient_watchers.remove(self._look)
        self._recorder.close()

    def _look(self, stats: GradientStats) -> None:
        if stats.norm.finite or any(sharded.skip_next for sharded in self.engine.optimizers):
            return  # an overflow of scaled fp16 gradients is no error
        counts = stats.nonfinite.tolist()
        mine = {name: count for name, count in zip(stats.names, counts, strict=True) if count}
        everyone = self.engine.mesh.control.all_gather_objects(mine)
        parameters: dict[str, int] = {}
        for name, _ in self.engine.model.names():
            total = sum(part.get(name, 0) for part in everyone)
            if total:
                parameters[name] = total
        rank, origin = self._search()
        self.found = NonFinite(self.engine.steps.taken, parameters, rank, origin)
        if self.raises:
            raise NonFiniteError(self.found)
        if self.engine.mesh.rank == 0:
            _log.error("%s", self.found)

    # ---- the search ----

    def _search(self) -> tuple[int | None, Origin | None]:
        """Run the step's forwards again, then its backwards, each on all ranks, up to what is found first."""
        calls, control = self._recorder.calls, self.engine.mesh.control
        shapes = control.all_gather_objects([(call.name, call.micro_batch) for call in calls])
        if any(shape != shapes[0] for shape in shapes):  # ranks would wait for each other in gathers
            return None, None
        replay = Replay(self.engine.module)
        with kept_random_state(), self._recorder.paused(), self.engine.model.reducer.paused():
            for look in (replay.forward, replay.loss, replay.backward):  # all ranks run the same, and meet after each
                for call in calls:
                    origin = None
                    with suppress(Exception):  # what cannot be run again tells nothing; what was found is still told
                        with self.engine.forward_scope():
                            origin = look(call)
                    found = control.all_gather_objects(origin)
                    for rank, each in enumerate(found):
                        if each is not None:
                            return rank, each
        return None, None
