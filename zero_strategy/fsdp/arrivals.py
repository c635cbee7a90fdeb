"""The gathers after a step that nobody has waited for, and the hooks that do; see `arriving` for what else waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from zero_strategy.fsdp.unit import Unit
from zero_strategy.fsdp.unshard import owners
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import compiled_frames


class Arrivals:
    """The gathers of one model that nobody has waited for.

    Args:
        module: The root.
        units: Its units.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._hooks: dict[int, list[Any]] = {}
        self._units = [unit for unit in units if unit.buckets]
        self._users = [_users(unit, module) for unit in self._units]
        self._scripted = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())

    def are_seen(self) -> bool:
        """True if uses of parameters can be seen, on the whole."""
        # TorchScript does not ask `__torch_function__`, and compiled code looks at the class, which would be another.
        return not self._scripted and not compiled_frames()

    def expect(self) -> None:
        """Have the modules that use arriving values wait for them."""
        for number, unit in enumerate(self._units):
            if number not in self._hooks and any(bucket.arriving for bucket in unit.buckets):
                hook = _ArrivalHook(self, number)
                # Before all other hooks: those of user code may use the values.
                self._hooks[number] = [
                    module.register_forward_pre_hook(hook, prepend=True) for module in self._users[number]
                ]

    def arrive(self, number: int) -> None:
        """Wait for the values of one unit."""
        for handle in self._hooks.pop(number, ()):
            handle.remove()
        for bucket in self._units[number].buckets:
            bucket.arrive()

    def finish(self) -> None:
        """Wait for all."""
        for number, _ in enumerate(self._units):
            self.arrive(number)

    def forget(self) -> None:
        """Wait for none any more: their ranks are gone."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()
        self._units.clear()

    def __del__(self) -> None:
        """Parameters outlive their engine, and nobody else knows of what comes to them; no host waits in it."""
        self.finish()


def _users(unit: Unit, root: nn.Module) -> list[nn.Module]:
    """Modules whose forward uses a unit: its own; of the root's, which calls others first, those with parameters."""
    if unit.module is not root:
        return [unit.module]
    owned = {id(parameter) for bucket in unit.buckets for parameter in bucket.parameters}
    # A root without parameters of its own need not wait before it calls the modules that have them.
    mine = any(id(parameter) in owned for parameter in root.parameters(recurse=False))
    return [*([root] if mine else ()), *owners(unit, root)]


class _ArrivalHook(EphemeralHook):
    """A forward pre-hook that runs once; inert in copies of the module, and without an engine, which has waited."""

    def __init__(self, arrivals: Arrivals, number: int) -> None:
        # Weakly: modules outlive their engine, at whose end `Arrivals` waits for what nobody has used.
        self._arrivals, self._number = ref(arrivals), number

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Wait for the values of the unit."""
        if (arrivals := self._arrivals()) is not None:
            arrivals.arrive(self._number)
