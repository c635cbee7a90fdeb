"""Activation checkpointing of units: their forward runs inside of a checkpoint and can be replayed.

The `forward` of a unit runs inside of a checkpoint. Its recomputation leaves the unit's buffers as they are.

The checkpoint lies inside of the unit's hooks. So a unit of stage 3 is gathered when the gradient of its output
arrives, computed again while it is whole, and released when the gradients of its inputs are done; and hooks of a
user's own see one forward.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_strategy.activation.budget import Profile, StepProfile, choose_within
from zero_strategy.activation.droppable import Droppable
from zero_strategy.activation.offload import ActivationStore, model_storages
from zero_strategy.activation.products import selective_contexts
from zero_strategy.comm.collectives import Communicator
from zero_strategy.config import DEFAULT_BUDGET, ActivationCheckpointingConfig
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.unit import Unit
from zero_strategy.fsdp.unshard import Unsharder
from zero_strategy.runtime.torch_private import buffers_of, may_hook_saved_tensors, uncompiled, version_of
from zero_strategy.sequence.tiling import PlainForward


class Replay:
    """A forward, the first time with the caller's own arguments, then with the tensors that were kept.

    The tensors are arguments of their own, so that whoever looks at what autograd saves sees them, whether they were
    given by position, by name or in a container. Lists and dicts are made anew for a replay: what a forward appends to
    one is appended once.

    Args:
        forward: What is run.
        args: Its arguments.
        kwargs: Its arguments by name.

    Attributes:
        tensors: Those among the arguments.
        fills: The forward may append to a list or a dict of the caller's.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.tensors: list[Tensor] = []
        self._shape = _take_out((args, kwargs), self.tensors)
        self.fills = any(type(value) in (list, dict) for value in (*args, *kwargs.values()))

    def take_tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order; they are not held here any longer."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        if self._given is not None:
            # Held until backward, they would be kept beside what autograd saves of them.
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
        """Note the state before a forward."""
        return [
            BufferState(owner, name, buffer, version_of(buffer), self._copy(owner, name, buffer))
            for owner in self._module.modules()
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
        return buffer.detach().clone() if self._learning or (id(owner), name) in self._changing else None

    def after(self, states: Sequence[BufferState]) -> list[BufferState]:
        """After a forward, give those that it changed."""
        self._changing |= {(id(state.owner), state.name) for state in states if self._has_changed(state)}
        self._learning = False
        return [s for s in states if s.copy is not None and (id(s.owner), s.name) in self._changing]

    def _has_changed(self, state: BufferState) -> bool:
        if buffers_of(state.owner).get(state.name) is not state.buffer or version_of(state.buffer) != state.version:
            return True
        return self._learning and state.copy is not None and not torch.equal(state.copy, state.buffer)

    @staticmethod
    def reset(states: Sequence[BufferState]) -> None:
        """Write the values of before a forward that has failed; those that were not copied do not change in one."""
        for state in states:
            if state.copy is not None:
                buffers_of(state.owner)[state.name] = state.buffer
                if not torch.equal(state.buffer, state.copy):  # others may have been saved by autograd
                    state.buffer.detach().copy_(state.copy)

    @staticmethod
    @contextmanager
    def restored(changed: Sequence[BufferState]) -> Iterator[None]:
        """Inside, modules have the values of before the forward; outside nothing of what was written."""
        present = [buffers_of(state.owner)[state.name] for state in changed]
        for state in changed:
            assert state.copy is not None
            # A copy again, as a second backward through the graph begins with the same values.
            buffers_of(state.owner)[state.name] = state.copy.clone()
        try:
            yield
        finally:
            for state, buffer in zip(changed, present, strict=True):
                buffers_of(state.owner)[state.name] = buffer


_logger = logging.getLogger(__name__)


class UnitActivations:
    """Tensors that autograd keeps of the units of a sharded model.

    Units inside of another one are computed again with that one. The root is no such unit.

    Args:
        model: The model; `forward` of its units is replaced where there is anything to do.
        settings: What is computed again.
        tier: Where what is kept waits: "none" (the device) or "cpu".
        guard: Of the first steps, in which nothing is to be computed again unless memory runs short.

    Attributes:
        forwards: In the order of registration.
        profile: What is being measured, until units have been chosen by a budget.
        store: Where what is kept waits; None: on the device.
        guard: See the argument; None: the first steps are over, or nobody guards them.
    """

    def __init__(
        self,
        model: ShardedModel,
        settings: ActivationCheckpointingConfig,
        tier: str = "none",
        guard: StepGuard | None = None,
    ) -> None:
        self._settings, self.guard = settings, guard
        self.mode, self._budget = settings.mode, settings.budget or DEFAULT_BUDGET
        self._derived = settings.budget is None or settings.is_derived("budget")
        self.forwards: list[UnitForward] = []
        self.profile: StepProfile | None = None
        self.store: ActivationStore | None = None
        if tier == "cpu" and model.device.type != "cpu":  # else they are there already
            self.store = ActivationStore(model.device, model_storages(model))
        if self.mode == "none" and tier == "none" and guard is None:
            return
        units = outermost(model.units)
        if not units and self.mode == "none" and tier == "none":
            self.guard = None
        elif not units:
            warnings.warn(
                f"activation_checkpointing.mode is {self.mode!r}, offload.activations {tier!r}, and this model has no "
                "units besides the root, so they change nothing; name its layers in units.classes or units.patterns",
                stacklevel=3,
            )
        self.forwards = [UnitForward(unit, number, self, model.unsharder) for number, unit in enumerate(units)]
        for number, forward in enumerate(self.forwards):
            forward.recomputed = (self.mode != "none" or guard is not None) and (
                self.mode != "every_n" or number % settings.every_n == 0
            )
        if self.mode == "budget" and units:
            self.profile = StepProfile(model_storages(model))

    @property
    def recomputed(self) -> list[str]:
        """Names of the units that are computed again."""
        return [forward.name for forward in self.forwards if forward.recomputed]

    def undo(self) -> None:
        """Let every unit have its own `forward` again."""
        for forward in self.forwards:
            forward.undo()
        self.forwards, self.profile, self.store, self.guard = [], None, None, None

    def choose(self, control: Communicator) -> None:
        """Choose units by the budget once something was measured; all ranks call it before an optimizer step.

        Ranks take the measurement of the rank that keeps most.

        Raises:
            ValueError: If somebody set a budget that is too small for any choice; says what is enough.
        """
        if self.profile is None:
            return
        # A rank without a forward has nothing to tell, and takes part all the same.
        found = [profile for profile in control.all_gather_objects(self.profile.result()) if profile is not None]
        if not found:
            return  # a step without a forward
        profile: Profile = max(found, key=lambda one: one.kept)
        chosen, limit = choose_within(profile, self._budget, derived=self._derived)
        if chosen is None:
            least = profile.peak(profile.units) / max(profile.kept, 1)
            raise ValueError(
                f"activation_checkpointing.budget is {self._budget:g}: of the {profile.kept} bytes that units keep "
                f"without recomputation {least:.1%} are taken even if all of them are computed again; accepted here: "
                f"{math.ceil(least * 1000) / 1000:g} or more, or mode: full"
            )
        for number, forward in enumerate(self.forwards):
            forward.recomputed = number in chosen
        self.profile = None
        _logger.info(
            "activation_checkpointing.budget %g: %d of %d units are computed again; %d bytes at most of %d",
            limit / max(profile.kept, 1),
            len(chosen),
            len(self.forwards),
            profile.peak(chosen),
            profile.kept,
        )

    def step_over(self, control: Communicator) -> None:
        """A step has ended; all ranks call it.

        If memory ran short on any rank in a guarded step, all units are computed again from now on.

        Args:
            control: Of all ranks.
        """
        guard = self.guard
        if guard is None:
            return
        short = [(rank, each) for rank, each in enumerate(control.all_gather_objects(guard.shortage)) if each]
        if short:
            self.guard, self.mode = None, "full"
            self._settings.record("mode", "full", "memory ran short: auto.enabled")
            if control.rank == 0:
                said = "; ".join(f"rank {rank}: {each}" for rank, each in short)
                warnings.warn(
                    "memory ran short in the first steps, which went on: all units are computed again from now on "
                    f"(activation_checkpointing.mode: full); {said}",
                    stacklevel=2,
                )
        elif guard.step_over():
            self.undo()  # nothing is computed again, as it was chosen


class StepGuard(Protocol):
    """A guard of the first steps; see `auto.guard`."""

    kept: Droppable
    shortage: str
    """When memory ran short; "": it did not."""

    def run(self, unit: int, forward: Callable[[], Any], again: Callable[[], Any] | None) -> Any:
        """Run a unit's forward, and if memory runs short in it, once more by `again`, if there is a way to."""

    def step_over(self) -> bool:
        """A step has ended on all ranks; True after the last one that is guarded."""


class UnitForward:
    """Stands in for the `forward` of one unit's module. A copy of the module has the class's own.

    Args:
        unit: The unit.
        number: Its place among those of `activations`.
        activations: Those it is one of.
        unsharder: Of the model, at stage 3.

    Attributes:
        name: Of the unit.
        recomputed: Whether it is computed again in backward.
    """

    def __init__(self, unit: Unit, number: int, activations: UnitActivations, unsharder: Unsharder | None) -> None:
        self.name, self.module, self.recomputed = unit.name, unit.module, True
        self._number = number
        self._activations, self._unsharder = activations, unsharder
        self._selective = activations.mode == "selective"
        self._buffers = BufferStates(unit.module)
        self._bound, self._undone = "forward" not in vars(unit.module), False
        self._forward: Callable[..., Any] = unit.module.forward
        update_wrapper(self, self._forward, updated=())
        object.__setattr__(unit.module, "forward", self)

    def undo(self) -> None:
        """Let the module have its own `forward` again; where somebody has wrapped this one, it only calls that."""
        self._undone = True
        if vars(self.module).get("forward") is not self:
            return
        if self._bound:
            object.__delattr__(self.module, "forward")
        else:
            object.__setattr__(self.module, "forward", self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._undone or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch's compiler decides inside of its graphs what is computed again
            return self._traced(args, kwargs)
        return self._run(args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Operations are counted by a dispatch mode, which kernels of compiled code do not pass.
        if self._activations.profile is not None:
            return self._uncompiled(args, kwargs)
        if self._activations.store is not None:
            return self._run_around_compiled(args, kwargs)
        if not self.recomputed or self._activations.guard is not None:  # a guard looks at nothing that is compiled
            return self._forward(*args, **kwargs)
        if self._selective:  # named here, for the compiler wants a plain function
            return checkpoint(self._forward, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    @uncompiled
    def _uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(args, kwargs)

    @partial(uncompiled, recursive=False)
    def _run_around_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hooks on what autograd keeps are set outside of compiled code; a checkpoint in them runs without it."""
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        activations = self._activations
        if activations.mode != "none":
            args, kwargs = without_caches(self.name, args, kwargs)
        elif activations.guard is not None:
            if not may_hook_saved_tensors():  # such as of a user's own checkpoint around it
                return self._forward(*args, **kwargs)
            args, kwargs = without_caches(self.name, args, kwargs)
        with nullcontext() if activations.store is None else activations.store.unit(self.module):
            return self._checkpointed(args, kwargs) if self.recomputed else self._forward(*args, **kwargs)

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = self._buffers.before()
        changed: list[BufferState] = []
        replay = Replay(self._forward, args, kwargs)
        # Before `take_tensors`, after which nobody here has the inputs.
        measured = self._measure(replay, states)
        contexts = partial(self._around, changed)
        tensors = replay.take_tensors()

        def forward() -> Any:
            return checkpoint(replay, *tensors, use_reentrant=False, context_fn=contexts)

        def again() -> Any:
            self._buffers.reset(states)
            return forward()

        guard = self._activations.guard
        # What a failed forward has appended to a list would be there twice.
        result = forward() if guard is None else guard.run(self._number, forward, None if replay.fills else again)
        tensors.clear()  # what autograd does not save goes
        # The contexts have this list already: only after the forward is it known what that changes.
        changed += self._buffers.after(states)
        measured(result)
        return result

    def _measure(self, replay: Replay, states: Sequence[BufferState]) -> Callable[[Any], None]:
        """Measure this forward, if that is asked for; gives what is to be called with its result."""
        profile = self._activations.profile
        if profile is None:
            return lambda result: None
        copied = [state for state in states if state.copy is not None]
        # The forward runs twice now, and running statistics are those of one.
        with self._buffers.restored(copied):
            inputs = replay.tensors
            return profile.measure(self._number, self.module, lambda: replay.again(inputs), inputs)

    def _around(self, changed: list[BufferState]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Context of a forward and its replays."""
        guard = self._activations.guard
        plain = nullcontext() if guard is None else guard.kept.context()
        first, again = selective_contexts() if self._selective else (plain, nullcontext())
        held = nullcontext if self._unsharder is None else self._unsharder.replay
        if (profile := self._activations.profile) is not None:
            return first, Around(profile.replay, held, partial(self._buffers.restored, changed))
        return first, Around(held, partial(self._buffers.restored, changed), lambda: again)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return PlainForward(memo.get(id(self.module)), self._forward if not self._bound else None)

    def __reduce__(self) -> Any:
        return PlainForward, (self.module, self._forward if not self._bound else None)


def outermost(units: Sequence[Unit]) -> list[Unit]:
    """Units that are in no other one, the root apart; containers without a forward are none."""
    names = outermost_names([(unit.name, unit.module) for unit in units])
    return [unit for unit in units[1:] if unit.name in names]


def outermost_names(units: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Names of those units, which are given by name and module, the root first."""
    found: list[str] = []
    for name, module in units[1:]:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def without_caches(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a forward without the keys and values that a transformers model collects for generation.

    They are on in training, too, by default; a replay would add the same keys once more.

    Raises:
        ValueError: If there are keys in one already, which the forward needs; names the unit.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches and not kwargs.get("use_cache"):
        return args, kwargs
    if any(cache.get_seq_length() for cache in caches):
        raise ValueError(
            f"unit {name!r} is given keys and values from outside (past_key_values, such as a trained prefix), which "
            "cannot be computed again; set activation_checkpointing.mode: none"
        )
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    # Only where it was given, for not every forward takes it.
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kwargs


def _is_cache(value: Any) -> bool:
    # By name: transformers need not be installed.
    kinds = type(value).__mro__
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in kinds)
