"""DeepSpeed's module tree from one table: the names of each module, and the module here that has each.

`install` adds a finder to the import system. Below `zero_strategy.compat.deepspeed` it makes the modules of the table
when they are imported; they look a name up when it is asked for, so that importing one loads nothing else. A name that
this package does not have is an ImportError with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

_HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Refused:
    """A name that is not here.

    Attributes:
        reason: Why, and what to do instead.
    """

    reason: str


Names = dict[str, str | Refused]


def _all(names: str, entry: str | Refused) -> Names:
    """One entry for several names; a module with a leading dot is one of this package."""
    return dict.fromkeys(names.split(), f"{_HERE}{entry}" if isinstance(entry, str) and entry[0] == "." else entry)


# ---- reasons ----

_MOE_LAYER = Refused(
    "layers of experts are the model's own: a Hugging Face model with an ep_plan, or modules with the three methods of "
    "zero_strategy.experts.DivisibleExperts. In place of MoE(ep_size=n) set mesh.expert to n, which is "
    "expert_parallel.autoep_size in DeepSpeed's JSON; without it experts are trained as all other parameters"
)
_EXPERT_GROUPS = Refused(
    "no group is made before the engine: set expert_parallel.autoep_size in the config, and take the ranks (group, "
    "size, rank) that divide experts from engine.zero.mesh.expert, those with the same ones from "
    "engine.zero.mesh.expert_reduce"
)
_SEQUENCES = Refused("sequence parallelism is not done; keep sequences whole on each rank")
_INFERENCE = Refused("kernels for generating are not part of this package; generate with the model itself")
_LR_TUNING = Refused("schedules are set in the config: scheduler.type and scheduler.params")
_TENSOR_PARALLEL = Refused(
    "layers are divided by torch's parallelize_module; give initialize() the model that it returns"
)
_CONFIG_CLASS = Refused(
    "zero_strategy.config.read_deepspeed(source) reads such a config, and says what became of each key"
)
_FLAT_STATE = Refused(
    "it is a part of DeepSpeed's optimizers; safe_get_full_fp32_param and its kin give what scripts ask for"
)
_SCALERS = Refused(
    "a checkpoint holds no object of a class of DeepSpeed's, so that none has to be allowed; drop the line. "
    "engine.loss_scale is the scale"
)
_TIMERS = Refused("diagnostics.run_dir records where the time of each step goes; zero-strategy report shows it")
_SWAPPERS = Refused(
    "its swappers are not part of this version; the engine moves parameters, gradients and optimizer states by "
    "itself where 'offload_param' or 'offload_optimizer' in the config says so"
)
_HELPERS = Refused(
    "this helper of DeepSpeed's is not part of this version; the documented ones are here (norms, clipping, "
    "memory), and what an engine needs besides it does itself"
)

# ---- names that several modules have ----

_ACTIVATION: Names = {
    **_all(
        "CheckpointFunction checkpoint configure get_cuda_rng_tracker initialize_rng_tracker is_configured "
        "model_parallel_cuda_manual_seed non_reentrant_checkpoint reset timings",
        "zero_strategy.activation.functional",
    ),
    **_all("CudaRNGStatesTracker _get_cuda_rng_state _set_cuda_rng_state", "zero_strategy.activation.rng"),
}
_CONFIGS = _all("BatchConfig Config FP16Config TrainingConfig", ".scripts.settings")
_CONFIG_ERROR = _all("DeepSpeedConfigError", "builtins:ValueError")
_DEVICE = _all("get_accelerator", ".environment")
_ENGINE = _all("DeepSpeedEngine", ".scripts.engine:ScriptEngine")
_FULL = _all(
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state",
    "zero_strategy.optim.full_state",
)
_GRIDS = _all(
    "flatten_dp_dimension get_model_3d_descriptor model_3d_desc unflatten_dp_dimension",
    ".grids",
)
_GRIDS_2D = _all("get_mpu_ranks meg_2d_parallel_map reshape_meg_2d_parallel", ".grids")
_LAYER: Names = {
    **_all("DeepSpeedTransformerConfig", ".transformer.config:TransformerConfig"),
    **_all("DeepSpeedTransformerLayer", ".transformer.layer:TransformerLayer"),
}
_LEAVES = _all(
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
    "zero_strategy.fsdp.layout",
)
_LOADER = _all("RepeatingLoader", ".scripts.data")
_LOCAL = _all(
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param "
    "safe_set_local_grad safe_set_local_optimizer_state",
    "zero_strategy.optim.full_state",
)
_FRAGMENTS = {**_LOCAL, **_all("get_full_hp_param get_full_hp_grad link_hp_params map_to_flat_opt_states", _FLAT_STATE)}
_LOG = _all("logger log_dist", ".environment")
_MOE = _all("MoE", _MOE_LAYER)
_MODULE: Names = {
    **_all("PipelineModule", "zero_strategy.pipeline.module"),
    **_all("LayerSpec TiedLayerSpec", "zero_strategy.pipeline.building"),
}
_ON_DEVICE = _all("OnDevice", ".environment")
_OFFLOAD = _all("DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum", ".zero")
_PIPELINE_ENGINE = _all("PipelineEngine", ".scripts.pipeline:ScriptPipelineEngine")
_PROFILER = _all("FlopsProfiler get_model_profile", ".flops_profiler")
_RANGES = _all("instrument_w_nvtx", ".environment")
_STATE_DICTS = _all("MegatronSDLoader SDLoaderBase SDLoaderFactory", ".state_dicts")
_TOPOLOGY = _all(
    "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology",
    "zero_strategy.pipeline.topology",
)
_WRITERS = _all(
    "CheckpointDataParallel DataParallelWriterConfig DataParallelWriterFactory ExpertParallelInfo MPUInfo "
    "UniversalParallelInfo",
    ".grids",
)
_ZERO = _all("GatheredParameters Init register_external_parameter unregister_external_parameter", ".zero")

TABLE: Mapping[str, Mapping[str, str | Refused]] = MappingProxyType(
    {
        "": {
            **_all("add_config_arguments initialize", ".scripts.entry"),
            **_all("init_distributed", "zero_strategy.comm.process_group"),
            **_ENGINE, **_PIPELINE_ENGINE, **_LAYER,
            **_all("PipelineModule", "zero_strategy.pipeline.module"),
            **_WRITERS, **_STATE_DICTS,
            **_all("DeepSpeedCheckpoint ZeROCheckpoint", ".checkpoints"),
            **_all(
                "get_model_3d_descriptor meg_2d_parallel_map merge_state model_3d_desc reshape_meg_2d_parallel",
                ".grids",
            ),
            **_CONFIG_ERROR, **_ON_DEVICE, **_LOG, **_DEVICE,
            **_all("init_inference InferenceEngine default_inference_config DeepSpeedInferenceConfig", _INFERENCE),
            **_all("DeepSpeedHybridEngine", _INFERENCE),
            **_all("tp_model_init", _TENSOR_PARALLEL),
            **_all("add_tuning_arguments", _LR_TUNING),
            **_all("DeepSpeedConfig", _CONFIG_CLASS),
        },
        "accelerator": {**_DEVICE, **_all("Accelerator", ".environment")},
        "checkpoint": {
            **_all("DeepSpeedCheckpoint ZeROCheckpoint", ".checkpoints"),
            **_all("get_model_3d_descriptor meg_2d_parallel_map merge_state model_3d_desc", ".grids"),
            **_all("partition_data reshape_meg_2d_parallel", ".grids"),
        },
        "checkpoint.deepspeed_checkpoint": _all(
            "ARGS_KEY CHECKPOINT_INFO_KEY DeepSpeedCheckpoint EMBEDDING_LAYER_INDEX FINAL_LAYER_NORM_INDEX "
            "ITERATION_KEY LAYER_CONCAT_DIM SEQUENTIAL_LAYERS",
            ".checkpoints",
        ),
        "checkpoint.ds_to_universal": {
            **_all("main", ".checkpoints:convert_to_universal"),
            **_all("parse_arguments", ".checkpoints:universal_arguments"),
        },
        "checkpoint.reshape_3d_utils": _GRIDS,
        "checkpoint.reshape_meg_2d": {**_GRIDS_2D, **_GRIDS},
        "checkpoint.reshape_utils": _all("merge_state partition_data", ".grids"),
        "checkpoint.zero_checkpoint": _all("ZeROCheckpoint", ".checkpoints"),
        "checkpointing": _ACTIVATION,
        "comm": {
            **_all("get_local_rank", ".environment"),
            **_all("init_distributed", "zero_strategy.comm.process_group"),
            **_all("log_summary", "zero_strategy.diagnostics.profiles"),
        },
        "config": _CONFIGS,
        "moe": _MOE,
        "moe.layer": _MOE,
        "moe.utils": _all(
            "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer", ".environment"
        ),
        "ops": {},
        "ops.adagrad": _all("DeepSpeedCPUAdagrad", ".optimizers"),
        "ops.adam": _all("DeepSpeedCPUAdam FusedAdam", ".optimizers"),
        "ops.lamb": _all("FusedLamb", ".optimizers"),
        "ops.lion": _all("DeepSpeedCPULion FusedLion", ".optimizers"),
        "ops.transformer": _LAYER,
        "pipe": {**_MODULE, **_TOPOLOGY},
        "profiling": {},
        "profiling.flops_profiler": _PROFILER,
        "profiling.flops_profiler.profiler": _PROFILER,
        "runtime": {},
        "runtime.activation_checkpointing": {},
        "runtime.activation_checkpointing.checkpointing": _ACTIVATION,
        "runtime.config": {**_CONFIGS, **_CONFIG_ERROR, **_all("DeepSpeedConfig", _CONFIG_CLASS)},
        "runtime.config_utils": _CONFIG_ERROR,
        "runtime.dataloader": _LOADER,
        "runtime.engine": _ENGINE,
        "runtime.fp16": {},
        "runtime.fp16.loss_scaler": _all("DynamicLossScaler LossScaler", _SCALERS),
        "runtime.lr_schedules": {
            **_all("LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR", ".schedules"),
            **_all(
                "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR "
                "CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE "
                "DECAY_STEP_SIZE EDGE_VALUE LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE "
                "LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE MID_VALUE ONE_CYCLE TOTAL_NUM_STEPS "
                "VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR "
                "WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE",
                ".schedules",
            ),
            **_all("add_tuning_arguments get_config_from_args get_lr_from_config", _LR_TUNING),
        },
        "runtime.model_checkpointing": {},
        "runtime.model_checkpointing.data_parallel_writer_factory": {
            **_WRITERS,
            **_all("CHECKPOINT_DATA_PARALLEL_UNITS", ".grids"),
        },
        "runtime.pipe": {**_MODULE, **_all("ProcessTopology", "zero_strategy.pipeline.topology")},
        "runtime.pipe.engine": _PIPELINE_ENGINE,
        "runtime.pipe.module": {**_MODULE, **_all("PipelineError", "zero_strategy.pipeline.transport")},
        "runtime.pipe.schedule": _all(
            "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch "
            "OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads "
            "SendActivation SendGrad TrainSchedule",
            "zero_strategy.pipeline.instructions",
        ),
        "runtime.pipe.topology": _TOPOLOGY,
        "runtime.state_dict_factory": {**_STATE_DICTS, **_all("AUTO_MODULE_KEY", ".state_dicts")},
        "runtime.swap_tensor": {},
        "runtime.utils": {
            **_all("DummyOptim", "zero_strategy.optim.fused"),
            **_all("align_dense_tensors all_gather_dp_groups", "zero_strategy.compat.megatron.fsdp_utils"),
            **_all(
                "bwc_tensor_model_parallel_rank is_model_parallel_parameter", "zero_strategy.compat.megatron.models"
            ),
            **_all(
                "clip_grad_norm_ clip_tensors_by_global_norm get_global_norm_of_tensors get_grad_norm",
                "zero_strategy.compat.megatron.gradients",
            ),
            **_all("ensure_directory_exists", "zero_strategy.checkpoint.storage"),
            **_all("get_ma_status see_memory_usage", "zero_strategy.diagnostics.recorder"),
            **_all("set_random_seed", "zero_strategy.activation.rng"),
        },
        "runtime.zero": _ZERO,
        "runtime.zero.config": {**_all("DeepSpeedZeroConfig ZeroStageEnum", ".zero"), **_OFFLOAD},
        "runtime.zero.offload_config": {**_OFFLOAD, **_all("OffloadStateTypeEnum", ".zero")},
        "runtime.zero.partition_parameters": {
            **_all("GatheredParameters Init ZeroParamStatus register_external_parameter", ".zero")
        },
        "runtime.zero.stage3": _all(
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live",
            ".zero",
        ),
        "runtime.zero.stage_1_and_2": _all(
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live",
            ".zero",
        ),
        "sequence": _all("DistributedAttention", _SEQUENCES),
        "sequence.layer": _all("DistributedAttention", _SEQUENCES),
        "utils": {**_LOADER, **_FULL, **_FRAGMENTS, **_LEAVES, **_LOG, **_ON_DEVICE, **_RANGES},
        "utils.groups": {
            **_all(
                "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
                "_get_model_parallel_rank _get_model_parallel_world_size _get_sequence_parallel_rank "
                "_get_sequence_parallel_world_size _get_world_group get_data_parallel_group get_data_parallel_rank "
                "get_data_parallel_world_size get_model_parallel_rank get_model_parallel_world_size get_world_group",
                ".environment",
            ),
            **_all(
                "_get_expert_data_parallel_group _get_expert_parallel_group _get_expert_parallel_rank "
                "_get_expert_parallel_world_size _get_max_expert_size",
                _EXPERT_GROUPS,
            ),
            **_all("_get_sequence_parallel_group _get_sequence_data_parallel_group", _SEQUENCES),
        },
        "utils.init_on_device": _ON_DEVICE,
        "utils.logging": _LOG,
        "utils.nvtx": _RANGES,
        "utils.tensor_fragment": {**_FULL, **_FRAGMENTS},
        "utils.timer": _all("SynchronizedWallClockTimer ThroughputTimer", _TIMERS),
        "utils.z3_leaf_module": _LEAVES,
        "utils.zero_to_fp32": _all(
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint",
            ".state_dicts",
        ),
        "zero": _ZERO,
    }
)  # fmt: skip
"""Place below `deepspeed`, then name: `module` or `module:attribute` that it is here, or why nobody has it.

A place with others below it is a package.
"""

OTHERS: Mapping[str, str | Refused] = MappingProxyType(
    {"comm": "torch.distributed", "runtime.swap_tensor": _SWAPPERS, "runtime.utils": _HELPERS}
)
"""Place: the module that has every other public name, or why nobody has one."""

_FILES = ("", "zero")
"""Places that are files of this package."""
_MISSING = object()


def install() -> None:
    """Let the modules of the table be imported. Safe to call again."""
    if not any(isinstance(finder, ModulesOfTable) for finder in sys.meta_path):
        # It comes first: a folder that an older version left behind would else be found as a namespace package.
        sys.meta_path.insert(0, ModulesOfTable())


def attribute(place: str, name: str) -> Any:
    """A module's attribute: a name of the table, a module below it, or what is asked elsewhere.

    Args:
        place: The module's path below `deepspeed`; "" is `deepspeed` itself.
        name: The attribute.

    Raises:
        AttributeError: If there is none.
        ImportError: If DeepSpeed has it and this package does not; says why.
    """
    below, module = f"{place}.{name}".lstrip("."), f"{_HERE}.{place}".rstrip(".")
    entry = TABLE[place].get(name)
    if entry is None and below in TABLE:
        return import_module(f"{_HERE}.{below}")
    if entry is None and place in OTHERS:
        others = OTHERS[place]
        if not name.startswith("__" if isinstance(others, Refused) else "_"):  # Python asks for such names itself
            entry = others
    if entry is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if isinstance(entry, Refused):
        raise ImportError(f"deepspeed.{below} is not here: {entry.reason}")
    source, _, there = entry.partition(":")
    found = getattr(import_module(source), there or name, _MISSING)
    if found is _MISSING:
        raise AttributeError(f"neither {module!r} nor {source!r} has {name!r}")
    return found


def directory(place: str) -> set[str]:
    """Names and modules of a place, without those that are refused.

    Args:
        place: The module's path below `deepspeed`.
    """
    prefix = f"{place}." if place else ""
    below = {path[len(prefix) :] for path in TABLE if path.startswith(prefix) and path != place}
    others = OTHERS.get(place)
    more = dir(import_module(others)) if isinstance(others, str) else []
    return {
        *_offered(place),
        *(path for path in below if path and "." not in path),
        *(name for name in more if not name.startswith("_")),
    }


def _offered(place: str) -> list[str]:
    return sorted(name for name, entry in TABLE[place].items() if not isinstance(entry, Refused))


def _place(module: str) -> str:
    return module.removeprefix(_HERE).lstrip(".")


class ModulesOfTable(MetaPathFinder):
    """Finds the modules of the table that are no files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for other names."""
        place = _place(fullname)
        if not fullname.startswith(f"{_HERE}.") or place in _FILES or place not in TABLE:
            return None
        package = any(other.startswith(f"{place}.") for other in TABLE)
        return ModuleSpec(fullname, _TableLoader(), origin=__name__, is_package=package)


class _TableModule(ModuleType):
    """A module that looks its names up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return attribute(_place(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a module on its package: one that is also a name (`utils.z3_leaf_module`) stays hidden.
        if not (isinstance(value, ModuleType) and name in TABLE[_place(self.__name__)]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *directory(_place(self.__name__))})


class _TableLoader(Loader):
    """Makes the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module of the name."""
        return _TableModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Describe it; its names are looked up later."""
        place = _place(module.__name__)
        names = _offered(place)
        module.__doc__ = f"`deepspeed.{place}`: {', '.join(names) or 'see dir()'}."
        module.__dict__["__all__"] = names

    def get_code(self, fullname: str) -> CodeType | None:
        """A call of its `main`, for `python -m`; None if it has none."""
        entry = TABLE[_place(fullname)].get("main")
        if not isinstance(entry, str):
            return None
        source, _, there = entry.partition(":")
        return compile(f"from {source} import {there or 'main'} as main\nmain()\n", fullname, "exec")
