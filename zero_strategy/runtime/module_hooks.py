"""Hooks of modules that copies of the modules do not have.

An engine's hooks hold the engine. A module that is copied or pickled must not take it along, nor train by it.
"""

from __future__ import annotations

from typing import Any


class InertHook:
    """Stand-in for a hook in a copy of a module: nothing happens."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class EphemeralHook:
    """Base of hooks that are inert in a copy of the module."""

    def check_copy(self, call: str) -> None:
        """Raise if the module cannot be copied now.

        Args:
            call: What copies it, for the message.

        Raises:
            RuntimeError: From classes that need their module's parameters full; this one lets every copy be made.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        self.check_copy("deepcopy")
        return InertHook()

    def __reduce__(self) -> Any:
        self.check_copy("pickling")
        return InertHook, ()
