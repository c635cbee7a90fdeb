"""A run's steps again, and two runs compared, by their journals (`diagnostics.journal_file`).

report = replay("runs/7", step=812, factory="train.py:factory")     # trains up to the step in this process
report = bisect("runs/7", "runs/8")                                 # reads both journals, and nothing else
print(report)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_strategy.replay.bisection import BisectReport, bisect
    from zero_strategy.replay.comparison import Difference
    from zero_strategy.replay.training import ReplayReport, replay

__all__ = ["BisectReport", "Difference", "ReplayReport", "bisect", "replay"]

_HOMES = {
    "BisectReport": "bisection",
    "bisect": "bisection",
    "Difference": "comparison",
    "ReplayReport": "training",
    "replay": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
