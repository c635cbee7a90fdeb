"""The optimizer that `ZeroAccelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
        together: Makes what is around a call that ranks without a batch follow, from its name, this and its arguments.
        stepped: Called after every step.
        stepping: Called before a step without a closure.
        skipped: Says whether the last step was not taken, since gradients were not finite.
    """

    def __init__(
        self,
        optimizer: Any,
        whole_state: Callable[[], dict[str, Any]],
        load_whole: Callable[[dict[str, Any]], None],
        scaler: AgreedGradScaler | None,
        together: Callable[..., AbstractContextManager[None]],
        stepped: Callable[[], None],
        stepping: Callable[[], None],
        skipped: Callable[[], bool],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._whole_state, self._load_whole = whole_state, load_whole
        self._agreed, self._together, self._stepped, self._stepping = scaler, together, stepped, stepping
        self._skipped = skipped

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step where gradients are synchronised; all ranks skip it, or none (`step_was_skipped`).

        Raises:
            FloatingPointError: If fp16 gradients overflow at the smallest loss scale, or gradients are not finite and
                `nonfinite_gradients` is `raise`.
        """
        if self.gradient_state.sync_gradients:
            if closure is None:
                self._stepping()
            with self._together("optimizer.step with a closure" if closure else "optimizer.step", self):
                self.take_step(closure)
            self._stepped()

    def take_step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, whether gradients are synchronised or not."""
        if self._agreed is None:
            self.optimizer.step(closure)
            self._is_overflow = self._skipped()
            return
        self._agreed.step(self.optimizer, closure)
        self._is_overflow = self._skipped()
        self._agreed.update()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or zero them in place, where they are synchronised."""
        if self.gradient_state.sync_gradients:
            with self._together("optimizer.zero_grad", self, set_to_none is not False):
                super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all ranks call it. `ZeroAccelerator.save_state` does without."""
        return self._whole_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        self._load_whole(state_dict)
