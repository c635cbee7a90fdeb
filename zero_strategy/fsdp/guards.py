"""Calls that need full parameters: while released they unshard them, or are refused by name.

`state_dict` and `load_state_dict` gather unit by unit (all ranks must call them; a rank that does not come is named).
`module.to(...)`, `.half()`, `.cuda()` are refused: a sharded parameter has its place and its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.divided_experts import DividedExperts
from zero_strategy.fsdp.layout import Placement
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import MovedStates
from zero_strategy.fsdp.unit import Unit
from zero_strategy.fsdp.unshard import owners, released_message
from zero_strategy.runtime.module_hooks import EphemeralHook, InertHook
from zero_strategy.runtime.torch_private import put_back_map_tensors, replace_map_tensors


class WatchedModel(Protocol):
    """A sharded model as these hooks see it; see `ShardedModel`."""

    module: nn.Module
    units: list[Unit]
    mesh: Mesh
    placement: Placement
    moved: MovedStates
    experts: DividedExperts

    def names(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def place(self, parameter: nn.Parameter) -> tuple[ParameterBucket, int] | None: ...

    def whole_of(self, tensor: Tensor) -> Tensor: ...


class ModuleGuards:
    """Hooks on the modules of a sharded model, outside of forward and backward."""

    def __init__(self, model: WatchedModel) -> None:
        self._open = 0
        self._handles: list[Any] = []
        self._applying: list[ApplyGuard] = []
        for unit in model.units:
            if not unit.buckets:
                continue
            for module in [unit.module, *owners(unit, model.module)]:
                guard = _UnitGuard(self, model, unit)
                self._handles.append(module.register_state_dict_pre_hook(_Call(guard, "before_save")))
                self._handles.append(module.register_state_dict_post_hook(_Call(guard, "after_save")))
                self._handles.append(module.register_load_state_dict_pre_hook(_Call(guard, "before_load")))
                self._handles.append(module.register_load_state_dict_post_hook(_Call(guard, "after_load")))
        sharded = {id(parameter) for _, parameter in model.names()}
        for module in model.module.modules():
            if not any(id(parameter) in sharded for parameter in module.parameters()):
                continue  # metrics and the like move as they do
            # Torch has no hook on `_apply`, so the module gets one of its own.
            replace_map_tensors(module, partial(self._guarded, module))

    def _guarded(self, module: nn.Module, original: Callable[..., nn.Module]) -> ApplyGuard:
        guard = ApplyGuard(module, original)
        self._applying.append(guard)
        return guard

    def unhook(self) -> None:
        """Let go of the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for guard in self._applying:
            put_back_map_tensors(guard.module, guard)
        self._applying.clear()

    def enter(self, model: WatchedModel, call: str) -> None:
        """The outermost call of a recursion meets the other ranks where a gather follows."""
        if not self._open and (model.placement.shard_parameters or model.experts.layers):
            model.mesh.barrier.wait_for_all(call)
        self._open += 1

    def reset(self) -> None:
        """Forget calls that an exception tore apart."""
        self._open = 0

    def leave(self) -> None:
        """The end of one level of the recursion."""
        self._open = max(0, self._open - 1)  # `reset` may have come between


class _UnitGuard:
    """`state_dict` and `load_state_dict` of one module that holds parameters of one unit."""

    def __init__(self, guards: ModuleGuards, model: WatchedModel, unit: Unit) -> None:
        self.guards, self.model, self.unit = guards, model, unit
        self._loading: list[tuple[nn.Parameter, Tensor]] = []

    def _pin(self, call: str) -> None:
        # Ranks meet before the first gather, so that one that does not come is named.
        self.guards.enter(self.model, call)
        self.unit.pinned += 1
        self.unit.gather()

    def _unpin(self) -> None:
        self.guards.leave()
        self.unit.pinned = max(0, self.unit.pinned - 1)
        self.unit.release()

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._pin("state_dict() of a sharded module")

    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.model.placement.shard_parameters:
            # The state has views of the bucket, which is about to be released; ties are there under each name.
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(state.get(prefix + name), Tensor) and self.model.place(parameter) is not None:
                    state[prefix + name] = parameter.detach().clone()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in self.model.experts and isinstance(state.get(prefix + name), Tensor):
                state[prefix + name] = self.model.whole_of(parameter)
        self._unpin()

    def before_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ValueError("load_state_dict(assign=True) would replace sharded parameters; load without assign")
        self.model.moved.check("load_state_dict()")
        # After all that is refused: an error on the way would leave the unit pinned.
        self._pin("load_state_dict() of a sharded module")
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and parameter in self.model.experts:
                part = self.model.experts.part_of(parameter)
                value = state[prefix + name] = part.of_whole(value) if value.shape == part.shape else value
            # Of another shape torch itself complains, when it has gone through all of them.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._loading.append((parameter, value))

    @torch.no_grad()
    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        for bucket in self.unit.buckets:
            # First: master weights follow with rounded values, which are replaced below.
            bucket.adopt()
        loaded, self._loading = self._loading, []
        for parameter, value in loaded:  # master weights take what was loaded before it was rounded
            place = self.model.place(parameter)
            if place is not None and place[0].has_master:
                place[0].set_master(place[1], value)
        self._unpin()


class _Call(EphemeralHook):
    """A hook that is a method of a unit's guard; inert in copies of the module."""

    def __init__(self, guard: _UnitGuard, method: str) -> None:
        self.guard, self.method = guard, method

    def __call__(self, *args: Any) -> None:
        getattr(self.guard, self.method)(*args)

    def check_copy(self, call: str) -> None:
        """Raise while the unit's parameters are released: a copy would have none."""
        if not self.guard.unit.gathered:
            raise RuntimeError(released_message(call, self.guard.unit.name))


def is_guard(hook: Any) -> bool:
    """True if a hook on a module is one of these, or what is left of one in a copy."""
    return isinstance(hook, (_Call, InertHook))


class ApplyGuard:
    """Stands in for a sharded module's `_apply`: lets no-op moves through, refuses those that change a parameter."""

    def __init__(self, module: nn.Module, original: Callable[..., nn.Module]) -> None:
        self.module, self.original = module, original

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, parameter in self.module.named_parameters():
            # Without elements: the answer costs no memory, and a released parameter has no values to try it on.
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            moved = function(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise RuntimeError(
                    f"parameter {name!r} is sharded: it cannot be changed from {probe.dtype} on {probe.device} to "
                    f"{moved.dtype} on {moved.device}. Cast or move the module before it is sharded, or choose the "
                    "precision and device where the engine is set up (Trainer(precision=..., accelerator=...))."
                )
        for module in self.module.modules() if recurse else [self.module]:
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, function(buffer))
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _PlainApply(memo.get(id(self.module)), self.original)

    def __reduce__(self) -> Any:
        return _PlainApply, (self.module, self.original)


class _PlainApply:
    """The class's own `_apply`, in a copy of a sharded module."""

    def __init__(self, module: nn.Module | None, original: Callable[..., nn.Module]) -> None:
        self.module, self.original = module, original

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        assert self.module is not None
        return self.original(self.module, function, recurse)
