"""The optimizer that `ZeroAccelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from zero_strategy.integrations.accelerate_scaler import AgreedGradScaler


class ZeroOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a torch optimizer that updates shards.

    It steps when gradients are synchronised, as Accelerate's does. The optimizer inside stays the user's object with
    the module's own parameters in its groups, so schedulers work.

    Args:
        optimizer: The user's.
        whole_state: Gives its whole state in the form of its own `state_dict()`. A collective.
        load_whole: Divides such a state among the ranks.
        scaler: Of the losses, in fp16.
    """

    def __init__(
        self,
        optimizer: Any,
        whole_state: Callable[[], dict[str, Any]],
        load_whole: Callable[[dict[str, Any]], None],
        scaler: AgreedGradScaler | None = None,
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._whole_state, self._load_whole, self._agreed = whole_state, load_whole, scaler

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step where gradients are synchronised; in fp16 all ranks skip it, or none (`step_was_skipped`).

        Raises:
            FloatingPointError: If fp16 gradients overflow at the smallest loss scale.
        """
        if self._agreed is None:
            super().step(closure)
        elif self.gradient_state.sync_gradients:
            self._agreed.step(self.optimizer, closure)
            self._is_overflow = not self._agreed.last_step_finite
            self._agreed.update()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all ranks call it. `ZeroAccelerator.save_state` does without."""
        return self._whole_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        self._load_whole(state_dict)
