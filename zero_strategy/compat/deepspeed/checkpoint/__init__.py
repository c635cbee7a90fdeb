"""`deepspeed.checkpoint`: checkpoints of several parallel ranks; each name is imported when it is asked for."""

from __future__ import annotations

from types import MappingProxyType

from zero_strategy.compat.deepspeed.on_demand import on_demand

_NAMES = MappingProxyType(
    {
        "DeepSpeedCheckpoint": "deepspeed_checkpoint",
        "ZeROCheckpoint": "zero_checkpoint",
        "get_model_3d_descriptor": "reshape_3d_utils",
        "meg_2d_parallel_map": "reshape_meg_2d",
        "merge_state": "reshape_utils",
        "model_3d_desc": "reshape_3d_utils",
        "partition_data": "reshape_utils",
        "reshape_meg_2d_parallel": "reshape_meg_2d",
    }
)
_ROOMS = (
    "deepspeed_checkpoint",
    "ds_to_universal",
    "reshape_3d_utils",
    "reshape_meg_2d",
    "reshape_utils",
    "zero_checkpoint",
)

__all__ = list(_NAMES)
__getattr__ = on_demand(__name__, _ROOMS, _NAMES)
