"""ZeRO in the workers of Ray Train: strategies that `prepare_trainer` accepts, and reports of sharded checkpoints.

Ray starts the processes and their group; ranks, devices and samplers follow its context. Checkpoints are directories
in the run's storage path that all workers write, and load at any number of workers. Ray's notice that a node is about
to be taken away makes all workers report. Ray is imported when a name is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_strategy.integrations.ray.callbacks import RayReportCallback
    from zero_strategy.integrations.ray.notices import save_on_notice
    from zero_strategy.integrations.ray.reports import CHECKPOINT_NAME, report, reported_checkpoint
    from zero_strategy.integrations.ray.strategies import RayPipelineStrategy, RayZeroStrategy
    from zero_strategy.integrations.ray.transformers import RaySaveCallback

__all__ = [
    "CHECKPOINT_NAME",
    "RayPipelineStrategy",
    "RayReportCallback",
    "RaySaveCallback",
    "RayZeroStrategy",
    "report",
    "reported_checkpoint",
    "save_on_notice",
]

_MODULE_OF = {
    "CHECKPOINT_NAME": "reports",
    "RayPipelineStrategy": "strategies",
    "RayReportCallback": "callbacks",
    "RaySaveCallback": "transformers",
    "RayZeroStrategy": "strategies",
    "report": "reports",
    "reported_checkpoint": "reports",
    "save_on_notice": "notices",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            needed = f"{__name__}.{name} needs Ray Train: pip install 'ray[train]'"
            raise ModuleNotFoundError(needed, name="ray") from error
