"""Dynamic loss scaling for fp16: small gradients are lifted above underflow, and ranks agree on skipping a step.

Source: Micikevicius et al., "Mixed Precision Training", 2018; the growth rule is torch.amp.GradScaler's.
"""

from __future__ import annotations

from typing import Any

from zero_strategy.config import LossScaleConfig


class LossScaler:
    """Scale factor that halves after a step with non-finite gradients and doubles after a run of good ones.

    Attributes:
        scale: What losses are multiplied by before backward.
        skipped: Steps skipped so far.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = float(config.initial)
        self.skipped = 0
        self._good_steps = 0
        # Overflows that leave the scale as it is, plus the one that lowers it.
        self._until_lower = config.hysteresis

    def update(self, *, finite: bool) -> None:
        """Follow a step; `finite` must be the same on all ranks.

        Raises:
            FloatingPointError: If the scale is at its minimum and gradients still overflow.
        """
        if not finite:
            self.skipped += 1
            self._good_steps = 0
            if self._until_lower > 1:
                self._until_lower -= 1
                return
            if self.scale <= self.config.minimum:
                raise FloatingPointError(
                    f"gradients are not finite at the smallest loss scale {self.scale:g}: this is no overflow of fp16 "
                    "but a diverged model or bad data. Lower the learning rate, clip gradients, or train in bf16."
                )
            self.scale = max(self.scale * self.config.backoff_factor, self.config.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self.config.growth_interval:
            self.scale *= self.config.growth_factor
            self._good_steps = 0
            self._until_lower = self.config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        state = {"scale": self.scale, "good_steps": self._good_steps, "skipped": self.skipped}
        if self.config.hysteresis > 1:
            state["until_lower"] = self._until_lower
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, or what torch.amp.GradScaler's gave."""
        self.scale = float(state["scale"])
        self._good_steps = int(state.get("good_steps", state.get("_growth_tracker", 0)))
        self.skipped = int(state.get("skipped", 0))
        # A state may come from a run that tolerated more overflows than this one.
        until_lower = int(state.get("until_lower", self.config.hysteresis))
        self._until_lower = min(max(until_lower, 1), self.config.hysteresis)
