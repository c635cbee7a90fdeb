"""DeepSpeed's names, without DeepSpeed: for scripts that are being moved over.

    import zero_strategy.compat.deepspeed as deepspeed

| here | there |
| --- | --- |
| `initialize`, `init_distributed`, `add_config_arguments`, `DeepSpeedEngine` | `deepspeed` |
| `zero.Init`, `zero.GatheredParameters`, `zero.register_external_parameter`; `runtime.zero` | the same |
| `comm.init_distributed`, `comm.get_rank` and all of torch.distributed | the same |
| `utils.safe_get_full_fp32_param` and its family, `utils.RepeatingLoader` | the same |
| `accelerator.get_accelerator`, `utils.groups`, ..., and names that are refused: see `names.py` | the same |
| `DeepSpeedTransformerConfig`, `DeepSpeedTransformerLayer`; `ops.transformer` | the same |
| `config`, `ops.adam`, `runtime.config`, `runtime.dataloader`, `runtime.engine`, `runtime.lr_schedules` | the same |
| `runtime.zero.stage_1_and_2.estimate_zero2_...`, `runtime.zero.stage3.estimate_zero3_...` | the same |
| `checkpoint`: `DeepSpeedCheckpoint`, `ZeROCheckpoint`, `model_3d_desc`, `reshape_meg_2d_parallel`, ... | the same |
| `checkpoint.ds_to_universal.main` | the same |
| `checkpointing`: `configure`, `checkpoint`, `reset`, `CudaRNGStatesTracker`, ... | the same |
| `runtime.activation_checkpointing.checkpointing` | the same |
| `runtime.utils`: `clip_grad_norm_`, `see_memory_usage`, `set_random_seed`, ... | the same |
| `runtime.state_dict_factory`: `SDLoaderFactory`, `MegatronSDLoader` | the same |
| `PipelineModule`; `pipe`: `LayerSpec`, `TiedLayerSpec`, `ProcessTopology`, ... | the same |
| `runtime.pipe`: `module`, `topology`, `schedule`, `engine.PipelineEngine` | the same |
| `runtime.model_checkpointing.data_parallel_writer_factory`: `DataParallelWriterFactory`, ... | the same |

Each is imported when it is asked for. The functions behind the names are the package's own: `initialize` here is
`zero_strategy.initialize`. Names of modules that this version does not have (`runtime.swap_tensor`, ...) are an
ImportError that says so (`absent.py`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from zero_strategy.compat.deepspeed.names import named
from zero_strategy.compat.deepspeed.on_demand import on_demand
from zero_strategy.config.deepspeed.keys import DEFAULTS_VERSION

_WRITERS = "runtime.model_checkpointing.data_parallel_writer_factory"
_NAMES = MappingProxyType(
    {
        "DeepSpeedEngine": "runtime.engine",
        "DeepSpeedTransformerConfig": "ops.transformer",
        "DeepSpeedTransformerLayer": "ops.transformer",
        "PipelineEngine": "runtime.pipe.engine",
        "PipelineModule": "pipe",
        "add_config_arguments": "zero_strategy.compat.deepspeed.scripts",
        "init_distributed": "comm",
        "initialize": "zero_strategy.compat.deepspeed.scripts",
        "DataParallelWriterConfig": _WRITERS,
        "DataParallelWriterFactory": _WRITERS,
        "CheckpointDataParallel": _WRITERS,
        "ExpertParallelInfo": _WRITERS,
        "MPUInfo": _WRITERS,
        "UniversalParallelInfo": _WRITERS,
        "DeepSpeedCheckpoint": "checkpoint",
        "ZeROCheckpoint": "checkpoint",
        "get_model_3d_descriptor": "checkpoint",
        "meg_2d_parallel_map": "checkpoint",
        "model_3d_desc": "checkpoint",
        "reshape_meg_2d_parallel": "checkpoint",
        "merge_state": "checkpoint",
        "MegatronSDLoader": "runtime.state_dict_factory",
        "SDLoaderBase": "runtime.state_dict_factory",
        "SDLoaderFactory": "runtime.state_dict_factory",
    }
)

_ROOMS = (
    "accelerator", "checkpoint", "checkpointing", "comm", "config", "moe", "ops", "pipe", "profiling", "runtime",
    "sequence", "utils", "zero",
)  # fmt: skip

__all__ = list(_NAMES)

__version__ = DEFAULTS_VERSION
"""The version of DeepSpeed whose names and defaults these are."""

_here, _elsewhere = on_demand(__name__, _ROOMS, _NAMES), named(__name__)


def __getattr__(name: str) -> Any:
    return _here(name) if name in _ROOMS or name in _NAMES else _elsewhere(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_ROOMS])
