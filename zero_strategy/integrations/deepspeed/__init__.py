"""DeepSpeed's names for checkpoints, without DeepSpeed: for scripts that are being moved over.

| here | there |
| --- | --- |
| `DeepSpeedCheckpoint`, `ZeROCheckpoint`, `model_3d_desc`, `reshape_meg_2d_parallel`, ... | `deepspeed.checkpoint` |
| `SDLoaderFactory`, `MegatronSDLoader` | `deepspeed.runtime.state_dict_factory` |
| `DataParallelWriterFactory`, ... | `deepspeed.runtime.model_checkpointing` |
| `ds_to_universal.main` | `deepspeed.checkpoint.ds_to_universal` |

Each is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_NAMES = MappingProxyType(
    {
        "DataParallelWriterConfig": "data_parallel_writer_factory",
        "DataParallelWriterFactory": "data_parallel_writer_factory",
        "CheckpointDataParallel": "data_parallel_writer_factory",
        "ExpertParallelInfo": "data_parallel_writer_factory",
        "MPUInfo": "data_parallel_writer_factory",
        "UniversalParallelInfo": "data_parallel_writer_factory",
        "DeepSpeedCheckpoint": "checkpoint",
        "ZeROCheckpoint": "zero_checkpoint",
        "get_model_3d_descriptor": "reshape",
        "meg_2d_parallel_map": "reshape",
        "model_3d_desc": "reshape",
        "reshape_meg_2d_parallel": "reshape",
        "merge_state": "merging",
        "MegatronSDLoader": "state_dict_factory",
        "SDLoaderBase": "state_dict_factory",
        "SDLoaderFactory": "state_dict_factory",
    }
)

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
