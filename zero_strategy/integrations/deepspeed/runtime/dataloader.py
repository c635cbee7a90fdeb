"""`deepspeed.runtime.dataloader`."""

from zero_strategy.scripts.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
