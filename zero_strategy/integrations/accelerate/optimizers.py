"""Accelerate's wrappers around optimizers and schedules, over shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate.models import PreparedModels
from zero_strategy.integrations.accelerate.scaler import AgreedGradScaler


class ZeroOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a torch optimizer that updates shards.

    It steps when gradients are synchronised, as Accelerate's does. The optimizer inside stays the user's object with
    the module's own parameters in its groups, so schedulers work.

    Args:
        optimizer: The user's.
        models: Those that were prepared.
        scaler: Of the losses, in fp16.
        stepping: Called before a step without a closure.
        stepped: Called after every step.
    """

    def __init__(
        self,
        optimizer: Any,
        models: PreparedModels,
        scaler: AgreedGradScaler | None,
        stepping: Callable[[ZeroOptimizer], None],
        stepped: Callable[[ZeroOptimizer], None],
    ) -> None:
        # Accelerate would move the state to the device, and it lies where the shards are.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._models, self._agreed, self._stepping, self._stepped = models, scaler, stepping, stepped

    def belongs_to(self, models: PreparedModels) -> bool:
        """True if it was prepared with these; another accelerator wraps the optimizer inside anew."""
        return self._models is models

    @property
    def engine(self) -> ZeroEngine:
        """The engine of its model.

        Raises:
            ValueError: If that is not prepared.
        """
        return self._models.engine_of_optimizer(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step where gradients are synchronised; all ranks skip it, or none (`step_was_skipped`).

        Raises:
            FloatingPointError: If fp16 gradients overflow at the smallest loss scale, or gradients are not finite and
                `nonfinite_gradients` is `raise`.
        """
        if self.gradient_state.sync_gradients:
            if closure is None:
                self._stepping(self)
            with self._models.together("optimizer.step with a closure" if closure else "optimizer.step", self):
                self.take_step(closure)
            self._stepped(self)

    def take_step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, whether gradients are synchronised or not."""
        if self._agreed is None:
            self.optimizer.step(closure)
        else:
            self._agreed.step(self.optimizer, closure)
        # Accelerate's schedules leave out a step that was skipped.
        self._is_overflow = self.engine.sharded(self.optimizer).skipped
        # As in Accelerate's own wrapper, after every step of an optimizer.
        if self._agreed is not None:
            self._agreed.update()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or zero them in place, where they are synchronised."""
        if self.gradient_state.sync_gradients:
            with self._models.together("optimizer.zero_grad", self, set_to_none is not False):
                super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all ranks call it. `ZeroAccelerator.save_state` does without."""
        return self.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        self.engine.load_optimizer_state_dict(self.optimizer, state_dict)


class GroupedScheduler(AcceleratedScheduler):
    """Accelerate's wrapper around a schedule, where some processes have the same data.

    Args:
        prepared: Accelerate's.
        copies: Processes that have data of their own: steps of the schedule per optimizer step.
    """

    def __init__(self, prepared: AcceleratedScheduler, copies: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches)
        self._copies = copies

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """See Accelerate's, so many times."""
        stepped = self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers)
        if not stepped:
            super().step(*arguments, **keywords)
            return
        for _ in range(self._copies):
            total = getattr(self.scheduler, "total_steps", None)  # of OneCycle: no further than that
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*arguments, **keywords)
