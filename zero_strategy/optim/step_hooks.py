"""The order of the hooks around an optimizer's `step()`: the user's, and the engine's two in their midst.

    global and user's pre hooks | begin | step() | end | user's and global post hooks

Torch calls hooks in the order in which they were registered, and users register theirs before an engine takes the
optimizer as well as after. So the engine's hooks are not in the optimizer's tables: each table is replaced, once, by
one that shows the user's own table and puts the engine's hook behind it, or before it, whenever torch goes through it.
Handles that were given out before stay valid, since the user's own table stays as it is.

A class whose `step()` calls `super().step()` is called by torch with hooks around both, where an optimizer of the base
class was made before. The engine's step, and the user's hooks with it, are around the outermost call only: inside of it
the param groups hold pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, ValuesView
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from zero_strategy.runtime.torch_private import replace_step_hooks, step_hooks_of

Hook = Callable[..., Any]
"""A step hook of torch: takes the optimizer, the arguments and the keywords of its `step`."""


class StepHooks:
    """The engine's two hooks of one optimizer.

    Args:
        optimizer: The user's.
        begin: Called before torch's step, behind all pre hooks of the user; may return other arguments.
        end: Called after it, before all post hooks of the user.
    """

    def __init__(self, optimizer: Optimizer, begin: Hook, end: Hook) -> None:
        self._begin, self._end = begin, end
        self._running: FrameType | None = None
        before, after = step_hooks_of(optimizer)
        # An engine before this one has left its tables, which serve again: each new pair would be one more around them.
        self._before = before if isinstance(before, _HooksBefore) else _HooksBefore(before)
        self._after = after if isinstance(after, _HooksAfter) else _HooksAfter(after)
        self._before.engine = self._after.engine = self
        replace_step_hooks(optimizer, self._before, self._after)

    @property
    def running(self) -> bool:
        """True while the outermost `step()` runs.

        A step that raised has not ended, so its frame is looked for among the callers.
        """
        if self._running is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._running:
            frame = frame.f_back
        return frame is not None

    @property
    def over(self) -> bool:
        """True if the last step that began has ended."""
        return self._running is None

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin the engine's step; torch calls it."""
        # The frame of torch's wrapper: it is on the stack no longer when this `step()` is over, also by an exception.
        self._running = sys._getframe(1)
        return self._begin(optimizer, args, kwargs)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End the engine's step, where it is the outermost `step()` that ends; torch calls it."""
        # The wrapper of a `super().step()` inside of the outer one has a frame of its own.
        if sys._getframe(1) is self._running:
            # Before `_end`, which may raise: a frame that is kept keeps all of its locals alive.
            self._running = None
            self._end(optimizer, args, kwargs)

    def remove(self) -> None:
        """Leave the optimizer with the user's hooks alone."""
        # The tables stay in the optimizer, since handles that were given out may point to them.
        self._before.engine = self._after.engine = self._running = None


class _Hooks(MutableMapping[int, Hook]):
    """The user's table of hooks, which torch goes through by `values()`.

    Args:
        users: The table that the optimizer had. What is registered later goes there, too.
    """

    def __init__(self, users: MutableMapping[int, Hook]) -> None:
        self._users = users
        self.engine: StepHooks | None = None

    def __getitem__(self, key: int) -> Hook:
        return self._users[key]

    def __setitem__(self, key: int, hook: Hook) -> None:
        self._users[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._users[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._users)

    def __len__(self) -> int:
        return len(self._users)

    def values(self) -> ValuesView[Hook]:
        """The hooks in the order in which they are called."""
        return _InOrder(self)

    def in_order(self) -> Iterator[Hook]:
        """Go through them; which are called is decided on the way."""
        return iter(self._users.values())


class _InOrder(ValuesView[Hook]):
    """A view of a table's hooks, with the engine's among them."""

    _mapping: _Hooks

    def __iter__(self) -> Iterator[Hook]:
        return self._mapping.in_order()


class _HooksBefore(_Hooks):
    """Pre hooks: the user's, then the engine's; none in a step within a step."""

    def in_order(self) -> Iterator[Hook]:
        # The groups list pieces by now, which are not for the user's hooks to see.
        if self.engine is not None and self.engine.running:
            return
        yield from self._users.values()
        if self.engine is not None:
            yield self.engine.begin


class _HooksAfter(_Hooks):
    """Post hooks: the engine's, then the user's; no user's in a step within a step."""

    def in_order(self) -> Iterator[Hook]:
        if self.engine is not None:
            yield self.engine.end
        # Asked after `end`, which ends the outermost step alone: behind an inner one no hook of the user's is due.
        if self.engine is None or self.engine.over:
            yield from self._users.values()
