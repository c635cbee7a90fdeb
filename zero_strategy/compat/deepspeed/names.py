"""The names of DeepSpeed that scripts use beyond those that are defined in place: where each is, or why it is not.

A module of the tree has `__getattr__ = named(__name__)` and serves what the table has under its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

_HERE = __name__.rpartition(".")[0]
_OPTIM = "zero_strategy.optim"
_FULL = f"{_OPTIM}.full_state"
_LOCAL = _FULL
_LEAF = "zero_strategy.fsdp.units"
_CONFIG = f"{_HERE}.runtime.zero.config"
_GROUPS = f"{_HERE}.utils.groups"
_PROFILER = f"{_HERE}.profiling.flops_profiler.profiler"


@dataclass(frozen=True)
class Refused:
    """A name that is not here.

    Attributes:
        reason: Why, and what to do instead.
    """

    reason: str


_EXPERTS = Refused("experts in parallel are not done; experts of an ordinary module are trained at every stage")
_SEQUENCES = Refused("sequence parallelism is not done; keep sequences whole on each rank")
_INFERENCE = Refused("kernels for generating are not part of this package; generate with the model itself")
_LR_TUNING = Refused("schedules are set in the config: scheduler.type and scheduler.params")

_LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
)
_GROUP_NAMES = (
    "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size _get_model_parallel_rank "
    "_get_model_parallel_world_size _get_sequence_parallel_rank _get_sequence_parallel_world_size _get_world_group "
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
    "get_model_parallel_world_size get_world_group"
)
_SCHEDULES = (
    "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR CYCLE_MIN_MOM "
    "CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE EDGE_VALUE "
    "LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
    "LR_SCHEDULE MID_VALUE ONE_CYCLE TOTAL_NUM_STEPS VALID_LR_SCHEDULES WARMUP_COSINE_LR WARMUP_DECAY_LR "
    "WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS "
    "WARMUP_TYPE"
)


def _all(names: str, place: str | Refused) -> dict[str, str | Refused]:
    return dict.fromkeys(names.split(), place)


_OFFLOAD = "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum"
_UTILS = {
    **_all("logger log_dist", f"{_HERE}.utils.logging"),
    **_all("OnDevice", f"{_HERE}.utils.init_on_device"),
    **_all("safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state", _LOCAL),
    **_all("safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state", _LOCAL),
    **_all(_LEAVES, _LEAF),
    **_all("instrument_w_nvtx", f"{_HERE}.utils.nvtx"),
    **_all("get_full_hp_param get_full_hp_grad link_hp_params map_to_flat_opt_states", Refused(
        "it is a part of DeepSpeed's optimizers; safe_get_full_fp32_param and its kin give what scripts ask for"
    )),
}  # fmt: skip

TABLE: Mapping[str, Mapping[str, str | Refused]] = MappingProxyType(
    {
        "": {
            **_all("DeepSpeedConfigError", f"{_HERE}.runtime.config_utils"),
            **_all("OnDevice", f"{_HERE}.utils.init_on_device"),
            **_all("log_dist logger", f"{_HERE}.utils.logging"),
            **_all("get_accelerator", f"{_HERE}.accelerator"),
            **_all("init_inference InferenceEngine default_inference_config DeepSpeedInferenceConfig", _INFERENCE),
            **_all("DeepSpeedHybridEngine", _INFERENCE),
            **_all("tp_model_init", Refused(
                "layers are divided by torch's parallelize_module; give initialize() the model that it returns"
            )),
            **_all("add_tuning_arguments", _LR_TUNING),
            **_all("DeepSpeedConfig", Refused(
                "zero_strategy.config.read_deepspeed(source) reads such a config, and says what became of each key"
            )),
        },
        "accelerator": _all("get_accelerator", f"{_HERE}.accelerator"),
        "utils": _UTILS,
        "utils.logging": _all("logger log_dist", f"{_HERE}.utils.logging"),
        "utils.nvtx": _all("instrument_w_nvtx", f"{_HERE}.utils.nvtx"),
        "utils.init_on_device": _all("OnDevice", f"{_HERE}.utils.init_on_device"),
        "utils.tensor_fragment": {
            name: place for name, place in _UTILS.items() if name.startswith("safe_") or isinstance(place, Refused)
        }
        | _all(
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
            "safe_set_full_grad safe_set_full_optimizer_state",
            _FULL,
        ),
        "utils.z3_leaf_module": _all(_LEAVES, _LEAF),
        "utils.groups": {
            **_all(_GROUP_NAMES, _GROUPS),
            **_all("_get_expert_parallel_group _get_expert_data_parallel_group", _EXPERTS),
            **_all("_get_expert_parallel_world_size _get_expert_parallel_rank _get_max_expert_size", _EXPERTS),
            **_all("_get_sequence_parallel_group _get_sequence_data_parallel_group", _SEQUENCES),
        },
        "utils.zero_to_fp32": _all(
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint",
            f"{_HERE}.utils.zero_to_fp32",
        ),
        "runtime.config": {
            **_all("DeepSpeedConfigError", f"{_HERE}.runtime.config_utils"),
            **_all("DeepSpeedConfig", Refused(
                "zero_strategy.config.read_deepspeed(source) reads such a config, and says what became of each key"
            )),
        },
        "runtime.config_utils": _all("DeepSpeedConfigError", f"{_HERE}.runtime.config_utils"),
        "runtime.lr_schedules": {
            **_all(_SCHEDULES, f"{_HERE}.runtime.lr_schedules"),
            **_all("add_tuning_arguments get_config_from_args get_lr_from_config", _LR_TUNING),
        },
        "runtime.zero.config": _all(f"DeepSpeedZeroConfig ZeroStageEnum {_OFFLOAD}", _CONFIG),
        "runtime.zero.offload_config": {
            **_all(_OFFLOAD, _CONFIG),
            **_all("OffloadStateTypeEnum", f"{_HERE}.runtime.zero.offload_config"),
        },
        "runtime.zero.partition_parameters": {
            **_all("GatheredParameters Init register_external_parameter", f"{_HERE}.zero"),
            **_all("ZeroParamStatus", f"{_HERE}.runtime.zero.partition_parameters"),
        },
        "ops.adam": _all("DeepSpeedCPUAdam FusedAdam", f"{_HERE}.ops.adam"),
        "ops.lion": _all("DeepSpeedCPULion FusedLion", f"{_HERE}.ops.lion"),
        "ops.adagrad": _all("DeepSpeedCPUAdagrad", f"{_HERE}.ops.adagrad"),
        "ops.lamb": _all("FusedLamb", f"{_HERE}.ops.lamb"),
        "moe": _all("MoE", _EXPERTS),
        "moe.layer": _all("MoE", _EXPERTS),
        "moe.utils": _all(
            "is_moe_param split_params_into_different_moe_groups_for_optimizer has_moe_layers", f"{_HERE}.moe.utils"
        ),
        "profiling.flops_profiler": _all("FlopsProfiler get_model_profile", _PROFILER),
        "profiling.flops_profiler.profiler": _all("FlopsProfiler get_model_profile", _PROFILER),
        "runtime.fp16.loss_scaler": _all("DynamicLossScaler LossScaler", Refused(
            "a checkpoint holds no object of a class of DeepSpeed's, so that none has to be allowed; drop the line. "
            "engine.loss_scale is the scale"
        )),
        "utils.timer": _all("SynchronizedWallClockTimer ThroughputTimer", Refused(
            "diagnostics.run_dir records where the time of each step goes; zero-strategy report shows it"
        )),
        "sequence": _all("DistributedAttention", _SEQUENCES),
        "sequence.layer": _all("DistributedAttention", _SEQUENCES),
    }
)  # fmt: skip
"""Place below `deepspeed`, then name: the module that has it, or why nobody has."""


def named(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: what the table has for its place.

    Args:
        module: Its full name.
    """
    place = module.removeprefix(_HERE).removeprefix(".")

    def get(name: str) -> Any:
        entry = TABLE[place].get(name)
        if entry is None or entry == module:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if isinstance(entry, Refused):
            raise ImportError(f"deepspeed.{place + '.' if place else ''}{name} is not here: {entry.reason}")
        return getattr(import_module(entry), name)

    return get
