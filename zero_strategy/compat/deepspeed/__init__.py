"""DeepSpeed's names, without DeepSpeed: for scripts that are being moved over.

    import zero_strategy.compat.deepspeed as deepspeed

Its modules have DeepSpeed's paths and names: `deepspeed.zero.Init`, `deepspeed.ops.adam.FusedAdam`,
`deepspeed.utils.safe_get_full_fp32_param`, `deepspeed.runtime.lr_schedules.WarmupLR`, ... The table in `names.py` has
them all, and an import finder makes the modules; each name is imported when it is asked for. The functions behind the
names are the package's own: `initialize` here is `zero_strategy.initialize`. Names that this version does not have
(`deepspeed.runtime.swap_tensor`, `moe`, ...) are an ImportError that says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero_strategy.compat.deepspeed.names import attribute, directory, install
from zero_strategy.config.deepspeed.keys import DEFAULTS_VERSION

if TYPE_CHECKING:
    from zero_strategy.comm.process_group import init_distributed
    from zero_strategy.compat.deepspeed import zero as zero
    from zero_strategy.compat.deepspeed.checkpoints import DeepSpeedCheckpoint, ZeROCheckpoint
    from zero_strategy.compat.deepspeed.environment import OnDevice as OnDevice
    from zero_strategy.compat.deepspeed.environment import get_accelerator as get_accelerator
    from zero_strategy.compat.deepspeed.environment import log_dist as log_dist
    from zero_strategy.compat.deepspeed.environment import logger as logger
    from zero_strategy.compat.deepspeed.grids import (
        CheckpointDataParallel,
        DataParallelWriterConfig,
        DataParallelWriterFactory,
        ExpertParallelInfo,
        MPUInfo,
        UniversalParallelInfo,
        get_model_3d_descriptor,
        meg_2d_parallel_map,
        merge_state,
        model_3d_desc,
        reshape_meg_2d_parallel,
    )
    from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine as DeepSpeedEngine
    from zero_strategy.compat.deepspeed.scripts.entry import add_config_arguments, initialize
    from zero_strategy.compat.deepspeed.scripts.pipeline import ScriptPipelineEngine as PipelineEngine
    from zero_strategy.compat.deepspeed.state_dicts import MegatronSDLoader, SDLoaderBase, SDLoaderFactory
    from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig as DeepSpeedTransformerConfig
    from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer as DeepSpeedTransformerLayer
    from zero_strategy.pipeline.module import PipelineModule

__all__ = [
    "CheckpointDataParallel",
    "DataParallelWriterConfig",
    "DataParallelWriterFactory",
    "DeepSpeedCheckpoint",
    "DeepSpeedEngine",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "ExpertParallelInfo",
    "MPUInfo",
    "MegatronSDLoader",
    "PipelineEngine",
    "PipelineModule",
    "SDLoaderBase",
    "SDLoaderFactory",
    "UniversalParallelInfo",
    "ZeROCheckpoint",
    "add_config_arguments",
    "get_model_3d_descriptor",
    "init_distributed",
    "initialize",
    "meg_2d_parallel_map",
    "merge_state",
    "model_3d_desc",
    "reshape_meg_2d_parallel",
]

__version__ = DEFAULTS_VERSION
"""The version of DeepSpeed whose names and defaults these are."""

install()


def __getattr__(name: str) -> Any:
    return attribute("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *directory("")} - {"Any", "TYPE_CHECKING", "attribute", "directory", "install"})
