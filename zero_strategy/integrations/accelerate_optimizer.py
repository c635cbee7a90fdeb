"""The optimizer that `ZeroAccelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer


class ZeroOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a torch optimizer that updates shards.

    It steps when gradients are synchronised, as Accelerate's does. The optimizer inside stays the user's object with
    the module's own parameters in its groups, so schedulers work.

    Args:
        optimizer: The user's.
        whole_state: Gives its whole state in the form of its own `state_dict()`. A collective.
        load_whole: Divides such a state among the ranks.
    """

    def __init__(
        self,
        optimizer: Any,
        whole_state: Callable[[], dict[str, Any]],
        load_whole: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._whole_state, self._load_whole = whole_state, load_whole

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all ranks call it. `ZeroAccelerator.save_state` does without."""
        return self._whole_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        self._load_whole(state_dict)
