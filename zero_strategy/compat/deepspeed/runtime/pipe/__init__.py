"""`deepspeed.runtime.pipe`: its modules and their main names, each imported when it is asked for."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.on_demand import on_demand

_ROOMS = ("engine", "module", "schedule", "topology")
_NAMES = {
    "LayerSpec": "module",
    "PipelineModule": "module",
    "ProcessTopology": "topology",
    "TiedLayerSpec": "module",
}

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]

__getattr__ = on_demand(__name__, _ROOMS, _NAMES)
