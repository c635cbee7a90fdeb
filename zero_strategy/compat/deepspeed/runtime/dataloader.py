"""`deepspeed.runtime.dataloader`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.scripts.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
