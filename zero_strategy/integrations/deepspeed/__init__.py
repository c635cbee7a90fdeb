"""DeepSpeed's names, without DeepSpeed: for scripts that are being moved over.

    import zero_strategy.integrations.deepspeed as deepspeed

| here | there |
| --- | --- |
| `initialize`, `init_distributed`, `add_config_arguments`, `DeepSpeedEngine` | `deepspeed` |
| `zero.Init`, `zero.GatheredParameters`, `zero.register_external_parameter`; `runtime.zero` | `deepspeed.zero` |
| `comm.init_distributed`, `comm.get_rank` and all of torch.distributed | `deepspeed.comm` |
| `utils.safe_get_full_fp32_param` and its family, `utils.RepeatingLoader` | `deepspeed.utils` |
| `config`, `ops.adam`, `runtime.config`, `runtime.dataloader`, `runtime.engine`, `runtime.lr_schedules` | the same |
| `runtime.zero.stage_1_and_2.estimate_zero2_...`, `runtime.zero.stage3.estimate_zero3_...` | the same |
| `DeepSpeedCheckpoint`, `ZeROCheckpoint`, `model_3d_desc`, `reshape_meg_2d_parallel`, ... | `deepspeed.checkpoint` |
| `SDLoaderFactory`, `MegatronSDLoader` | `deepspeed.runtime.state_dict_factory` |
| `DataParallelWriterFactory`, ... | `deepspeed.runtime.model_checkpointing` |
| `ds_to_universal.main` | `deepspeed.checkpoint.ds_to_universal` |

Each is imported when it is asked for. The functions behind the names are the package's own: `initialize` here is
`zero_strategy.initialize`.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_NAMES = MappingProxyType(
    {
        "DeepSpeedEngine": "runtime.engine",
        "add_config_arguments": "zero_strategy.scripts",
        "init_distributed": "comm",
        "initialize": "zero_strategy.scripts",
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

_ROOMS = ("comm", "config", "ops", "runtime", "utils", "zero")

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _NAMES[name]
    return getattr(import_module(place if place.startswith("zero_strategy") else f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_ROOMS])
