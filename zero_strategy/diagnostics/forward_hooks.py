"""Hooks that tell when the whole module runs, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from zero_strategy.fsdp.unshard import InertHook
from zero_strategy.runtime.torch_private import uncompiled


def watch_forwards(
    module: nn.Module,
    around: Callable[[Any], AbstractContextManager[None]],
    gave: Callable[[Any], object],
) -> Callable[[], None]:
    """Enter `around(inputs)` for every forward of a module, and call `gave` with what it returns.

    Returns:
        Removes the hooks.
    """
    open_scopes: list[AbstractContextManager[None]] = []
    before = module.register_forward_pre_hook(_Before(open_scopes, around), with_kwargs=True, prepend=True)
    after = module.register_forward_hook(_After(open_scopes, gave), always_call=True)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


class _Before:
    def __init__(
        self, scopes: list[AbstractContextManager[None]], around: Callable[[Any], AbstractContextManager[None]]
    ) -> None:
        self._scopes, self._around = scopes, around

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        scope = self._around((args, kwargs))
        scope.__enter__()
        self._scopes.append(scope)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()


class _After:
    def __init__(self, scopes: list[AbstractContextManager[None]], gave: Callable[[Any], object]) -> None:
        self._scopes, self._gave = scopes, gave

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._scopes:
            self._scopes.pop().__exit__(None, None, None)
        if output is not None:
            self._gave(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()
