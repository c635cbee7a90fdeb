"""Saving the engine's state: what is saved, by whom and when, at once or in the background."""

from zero_strategy.saving.job import PendingSave
from zero_strategy.saving.saver import Saver

__all__ = ["PendingSave", "Saver"]
