"""The table of DeepSpeed's JSON keys: type, default, and what becomes of each.

A row has a key's type, DeepSpeed's default, and what becomes of it here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRANSLATED = "translated"
WITHOUT_EFFECT = "accepted without effect"
REJECTED = "rejected"

BOOL, INT, NUMBER, TEXT, LIST, MAPPING, ANY = "bool", "int", "number", "str", "list", "mapping", "any"
FLAG = "bool, 0 or 1"

Kind = str | tuple[str, ...]
"""One of the names above, or the words that are accepted, in any case of letters."""


@dataclass(frozen=True)
class Key:
    """One key with a value of its own."""

    kind: Kind
    """What its value is."""
    verdict: str
    """What becomes of it. A rejected key is still accepted at its default, which asks for nothing."""
    default: Any
    """DeepSpeed's default in the version that `DEFAULTS_VERSION` names; None is also accepted then."""
    note: str = ""
    """Why nothing is lost, or why it is rejected and what to use instead."""
    ours: str = ""
    """The setting that it is translated to."""
    auto: bool = False
    """Whether ``"auto"`` is accepted: the framework decides."""
    switched: bool = True
    """Whether the switch of its group turns it on and off."""


@dataclass(frozen=True)
class Group:
    """A key whose value is a mapping."""

    keys: Mapping[str, Key | Group]
    """What is known in it."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of its keys: deprecated ones, and those that DeepSpeed accepts as well."""
    switch: str = ""
    """The key that turns the group on. While that has its default, nothing in the group has an effect."""
    note: str = ""
    """Why a group that is turned on is rejected; empty if it is not."""
    open: bool = False
    """True where DeepSpeed itself does not say which keys there are."""
    truth: str = ""
    """The key that true or false in place of the mapping sets, to 1 or 0: an old form of `zero_optimization`."""


def translated(kind: Kind, default: Any, ours: str, note: str = "", *, auto: bool = False) -> Key:
    """A key that has a counterpart here."""
    return Key(kind, TRANSLATED, default, note, ours, auto)


def unneeded(kind: Kind, default: Any, why: str, *, auto: bool = False) -> Key:
    """A key that nothing is lost without."""
    return Key(kind, WITHOUT_EFFECT, default, why, "", auto)


def refused(kind: Kind, default: Any, why: str, *, auto: bool = False) -> Key:
    """A key that asks for what is not here, unless it has its default."""
    return Key(kind, REJECTED, default, why, "", auto)


def switched(
    why: str, keys: Mapping[str, Key | Group] | None = None, *, open: bool = False, auto: bool = False
) -> Group:
    """A group with the switch ``enabled`` that is rejected when turned on; by default it is off."""
    switch = refused(BOOL, False, why, auto=auto)
    return Group({"enabled": switch, **(keys or {})}, switch="enabled", note=why, open=open)


def carried_out(what: str, keys: Mapping[str, Key | Group]) -> Group:
    """A group with the switch ``enabled`` that is carried out when turned on; by default it is off."""
    return Group({"enabled": translated(BOOL, False, what), **keys}, switch="enabled")


def plain_keys(names: str, why: str) -> dict[str, Key | Group]:
    """Keys of any type, separated by blanks, that have an effect only through the group's switch."""
    return {name: unneeded(ANY, None, why) for name in names.split()}


_ZEROPP = "ZeRO++'s quantised collectives are not done here: they change gradients; leave it out"
_BUCKETS = "buckets follow the units of the model, and are sent as soon as each is ready"
_MESSAGES = "a gather is one collective per unit; the weights that arrive are the same"
_LIVE = "what is live is the unit in use and those that `prefetch` fetched ahead, each released after its use"
_SMALL = "small parameters travel in the message of their unit, so that keeping them whole would save no message"
_STAGING = "memory between files and steps is bounded as a whole, by offload.staging_bytes"
_PINNED = "host memory is page-locked wherever there is a GPU to copy to"
_BESIDE = "reads and writes always run beside the update"
_DTYPES = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "float", "half")

_DEVICES = ("none", "cpu", "nvme")
MAX_IN_CPU = 10**9
"""Elements of parameters that stay in host memory by default where their place is a drive."""
_PARAM_OFFLOAD = Group(
    {
        "device": translated(_DEVICES, "none", "offload.parameters", auto=True),
        "nvme_path": translated(TEXT, None, "offload.nvme_path", auto=True),
        "buffer_count": unneeded(INT, 5, _STAGING, auto=True),
        "buffer_size": unneeded(INT, 10**8, _STAGING, auto=True),
        "max_in_cpu": translated(INT, MAX_IN_CPU, "offload.resident_bytes", "its elements, in bytes"),
        "pin_memory": unneeded(BOOL, True, _PINNED),
    },
    switch="device",
)
_OPTIMIZER_OFFLOAD = Group(
    {
        "device": translated(_DEVICES, "none", "offload.optimizer", auto=True),
        "nvme_path": translated(TEXT, None, "offload.nvme_path", auto=True),
        "buffer_count": unneeded(INT, 4, _STAGING, auto=True),
        "pin_memory": unneeded(BOOL, True, _PINNED),
        "pipeline_read": unneeded(BOOL, False, _BESIDE),
        "pipeline_write": unneeded(BOOL, False, _BESIDE),
        "fast_init": unneeded(BOOL, False, "state that was never written is not read either"),
        "ratio": translated(NUMBER, 1.0, "offload.optimizer_ratio"),
        "super_offload": refused(BOOL, False, "it reorders updates, so weights may differ; leave it out"),
        "cpuadam_cores_perc": unneeded(NUMBER, 0.8, "it tunes super_offload"),
    },
    switch="device",
)
_ZENFLOW = "ZenFlow updates only part of the gradient's columns in a step, so weights differ; leave it out"
_LEAF = (
    "units that run different modules on different ranks (mixture of experts) are not supported; to gather modules as "
    "one, name all units in units.classes of a config of ours"
)

_STAGE3: dict[str, Key | Group] = {
    "stage3_prefetch_bucket_size": translated(
        INT, 5 * 10**7, "prefetch", "counted in units here: 0 is 0, any other number one unit ahead", auto=True
    ),
    "stage3_param_persistence_threshold": unneeded(INT, 10**5, _SMALL, auto=True),
    "stage3_model_persistence_threshold": unneeded(INT, sys.maxsize, _SMALL),
    "stage3_max_live_parameters": unneeded(INT, 10**9, _LIVE, auto=True),
    "stage3_max_reuse_distance": unneeded(INT, 10**9, _LIVE, auto=True),
    "stage3_gather_16bit_weights_on_model_save": unneeded(
        BOOL, False, "saved weights are always whole, and state_dict() gathers by itself", auto=True
    ),
    "stage3_module_granularity_threshold": unneeded(INT, 0, "units are whole blocks already; see units.min_numel"),
    "stage3_use_all_reduce_for_fetch_params": unneeded(BOOL, False, _MESSAGES),
    "stage3_allgather_sequential": unneeded(BOOL, False, _MESSAGES),
    "stage3_partition_stream_chunk_size": unneeded(INT, 0, "sharding.Init() makes parameters unit by unit"),
}

AIO = Group(
    plain_keys(
        "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
        "block size and queue depth are measured on the drive when the first file is made",
    )
)
"""The section `aio`, which older files have inside of `zero_optimization`."""

ZERO = Group(
    {
        "stage": translated(INT, 0, "stage"),
        "aio": AIO,
        "contiguous_gradients": unneeded(BOOL, True, "gradients always lie in one buffer per bucket"),
        "reduce_scatter": unneeded(BOOL, True, "stages 2 and 3 always reduce-scatter"),
        "reduce_bucket_size": unneeded(INT, 5 * 10**8, _BUCKETS, auto=True),
        "use_multi_rank_bucket_allreduce": unneeded(BOOL, True, _BUCKETS),
        "allgather_partitions": unneeded(BOOL, True, _MESSAGES),
        "allgather_bucket_size": unneeded(INT, 5 * 10**8, _BUCKETS, auto=True),
        "overlap_comm": unneeded(BOOL, None, "reductions always run beside the backward pass"),
        "load_from_fp32_weights": unneeded(BOOL, True, "checkpoints always hold the fp32 master weights"),
        "elastic_checkpoint": unneeded(BOOL, False, "every checkpoint loads at any stage and number of ranks"),
        "offload_param": _PARAM_OFFLOAD,
        "offload_optimizer": _OPTIMIZER_OFFLOAD,
        "zenflow": refused(MAPPING, None, _ZENFLOW),
        "sub_group_size": unneeded(INT, 10**9, "fused steps need no temporary copy that it would bound", auto=True),
        "cpu_offload": translated(BOOL, False, "offload.optimizer", "old for offload_optimizer.device: cpu"),
        "cpu_offload_param": translated(BOOL, False, "offload.parameters", "old for offload_param.device: cpu"),
        "cpu_offload_use_pin_memory": unneeded(BOOL, None, _PINNED),
        **_STAGE3,
        "ignore_unused_parameters": refused(
            BOOL,
            True,
            "a parameter without gradient is no error here; look for p.grad is None after backward",
        ),
        "legacy_stage1": unneeded(BOOL, False, "all stages are one implementation here"),
        "round_robin_gradients": unneeded(BOOL, False, "every rank owns an equal slice of each bucket already"),
        "zero_hpz_partition_size": refused(
            INT,
            1,
            "ZeRO++'s second partition is not kept here; mesh.replicate (hybrid sharding) keeps gathers inside a node",
        ),
        "zero_quantized_weights": refused(BOOL, False, _ZEROPP),
        "zero_quantized_nontrainable_weights": refused(BOOL, False, _ZEROPP),
        "zero_quantized_gradients": refused(BOOL, False, _ZEROPP),
        "zeropp_loco_param": refused(MAPPING, None, _ZEROPP),
        "mics_shard_size": refused(
            INT, -1, "MiCS is spelled mesh.replicate here: the world size divided by the shard size (hybrid sharding)"
        ),
        "mics_hierarchical_params_gather": unneeded(BOOL, False, _MESSAGES),
        "memory_efficient_linear": unneeded(BOOL, True, "linear layers are torch's own; nothing is kept twice"),
        "pipeline_loading_checkpoint": unneeded(BOOL, False, "each rank reads only its own slices"),
        "override_module_apply": unneeded(BOOL, True, "no module is patched; sharding.Init() covers initialisation"),
        "log_trace_cache_warnings": unneeded(BOOL, False, "there is no trace; the order of units is a hint only"),
        "enable_sanity_checks": unneeded(BOOL, False, "ranks always compare what they ran"),
        "save_muon_momentum_buffer_in_memory": refused(
            BOOL, False, "momenta of Muon are divided among ranks; offload.optimizer moves them"
        ),
        "leaf_module": Group(
            {
                "classes": refused(LIST, [], _LEAF),
                "names": refused(LIST, [], _LEAF),
                "name_suffixes": refused(LIST, [], _LEAF),
            }
        ),
        "parameter_alignment": unneeded(BOOL, False, "parameters always lie on 128-byte boundaries"),
        "compute_grad_norm": unneeded(BOOL, True, "the norm is computed when it is asked for or clipping needs it"),
    },
    spellings={
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        # Both spellings are right in DeepSpeed.
        **{name.removeprefix("stage3_"): name for name in _STAGE3},
    },
    truth="stage",
)

_FP16 = Group(
    {
        "enabled": translated(BOOL, False, "precision of the computation", "fp16", auto=True),
        "auto_cast": unneeded(BOOL, False, "the framework's precision casts the inputs"),
        "loss_scale": translated(NUMBER, 0, "loss_scale.initial, minimum, growth_interval", "0 is dynamic"),
        "initial_scale_power": translated(INT, 16, "loss_scale.initial", "2 to this power"),
        "loss_scale_window": translated(INT, 1000, "loss_scale.growth_interval"),
        "hysteresis": translated(INT, 2, "loss_scale.hysteresis"),
        "consecutive_hysteresis": translated(BOOL, False, "loss_scale.consecutive_hysteresis"),
        "min_loss_scale": translated(NUMBER, 1, "loss_scale.minimum"),
        "fp16_master_weights_and_grads": refused(
            BOOL, False, "master weights of fp16 would be summed in fp16; use bf16 with precision.master_weights: false"
        ),
    }
)
_BF16 = Group(
    {
        "enabled": translated(BOOL, False, "precision of the computation", "bf16", auto=True),
        "immediate_grad_update": unneeded(BOOL, False, "gradients are accumulated in fp32 as soon as they arrive"),
        "check_grad_overflow": translated(BOOL, True, "nonfinite_gradients", "true is skip"),
        "bf16_master_weights_and_grads": translated(BOOL, False, "precision.master_weights, precision.gradient_dtype"),
        "bf16_optimizer_states": translated(
            BOOL, False, "precision.master_weights", "optimizer state has the dtype of the weights that it updates"
        ),
    }
)
_CAST_TO = tuple(
    prefix + name for name in ("bfloat16", "bf16", "float16", "fp16", "half", "float32") for prefix in ("", "torch.")
)
_SENT = "gradients are summed in fp32, and parameters gathered in their own dtype, whatever module they are of"

PRECISION: dict[str, Key | Group] = {
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": carried_out(
        "autocast around the forward of a script's engine",
        {
            "dtype": translated(_CAST_TO, "bfloat16", "dtype of autocast"),
            "lower_precision_safe_modules": unneeded(LIST, None, _SENT),
        },
    ),
    "amp": switched(
        "Apex amp is gone from torch and DeepSpeed; use fp16 or bf16",
        {"opt_level": unneeded(TEXT, None, "amp is off", auto=True)},
        open=True,
        auto=True,
    ),
    "data_types": Group(
        {
            "grad_accum_dtype": translated(_DTYPES, None, "precision.gradient_dtype"),
            "param_dtype": refused(_DTYPES, None, "the dtype of parameters follows fp16.enabled and bf16.enabled"),
            "buffer_dtype": refused(_DTYPES, None, "buffers take the dtype of the computation; cast them in the model"),
            "keep_in_fp32_modules": refused(
                ANY, "auto", "which modules stay in fp32 is the model's own choice; cast them in the model", auto=True
            ),
        }
    ),
    "communication_data_type": translated(_DTYPES, None, "precision.reduce_dtype"),
    "seq_parallel_communication_data_type": unneeded(
        _DTYPES, "fp32", "what attention sends has the dtype of the computation"
    ),
    "fp32_allreduce": unneeded(BOOL, False, "gradients are summed in fp32 unless communication_data_type differs"),
}

_PRESCALE = "the sum is taken in fp32 and divided once, so that no scaling has to guard it from overflow"
_SUM = "gradients are averaged over ranks; for a sum multiply the loss by the number of ranks"

TRAINING: dict[str, Key | Group] = {
    "train_batch_size": translated(INT, None, "batch", "micro-batch x accumulation x ranks", auto=True),
    "train_micro_batch_size_per_gpu": translated(INT, None, "batch", auto=True),
    "gradient_accumulation_steps": translated(INT, None, "batch", auto=True),
    "managed_gradient_accumulation": refused(
        BOOL, True, "the loop that owns accumulation counts micro-batches; steps of your own go with no_sync()"
    ),
    "gradient_clipping": translated(NUMBER, 1.0, "gradient clipping", "0 does not clip", auto=True),
    "prescale_gradients": unneeded(BOOL, False, _PRESCALE),
    "gradient_predivide_factor": unneeded(NUMBER, 1.0, _PRESCALE),
    "gradient_allreduce_op": refused(("mean", "sum"), "mean", _SUM),
    "sparse_gradients": refused(BOOL, False, "sparse gradients are not reduced; use Embedding(sparse=False)"),
    "disable_allgather": unneeded(BOOL, False, _MESSAGES),
    "optimizer": Group(
        {
            "type": translated(TEXT, None, "optimizer"),
            "params": translated(MAPPING, None, "optimizer"),
            "legacy_fusion": unneeded(BOOL, False, "fused steps are always taken where they can be"),
        }
    ),
    "scheduler": Group({"type": translated(TEXT, None, "scheduler"), "params": translated(MAPPING, None, "scheduler")}),
    "zero_allow_untested_optimizer": unneeded(
        FLAG, False, "whether an optimizer can run on slices is checked; see elementwise_optimizers"
    ),
    "zero_force_ds_cpu_optimizer": unneeded(BOOL, True, "any elementwise optimizer is taken"),
    "dataloader_drop_last": translated(BOOL, False, "DataLoader(drop_last=...)"),
}

DEFAULTS_VERSION = "0.19.8"
"""The DeepSpeed version whose defaults are followed."""

_MODULE = "DeepSpeed does not look at it: the PipelineModule says it by its argument"
_UNDIVIDED = "only how tensor-parallel ranks share a message between stages differs; what arrives is the same"
_RECOMPUTED = "for what the model gives to deepspeed.checkpointing.checkpoint"
_PLANS = "the model's own tp_plan says which layers are divided; give another one to divide_layers in your code"
_WHERE_EXPERTS = "the model's own ep_plan, or the methods of DivisibleExperts, say which layers have experts"
_EXPERTS_COMPUTE = "experts compute by the model's own code, and tokens travel by all-to-alls; the results are the same"
_ROUTER = "the model's own router chooses experts and weights them; set this in the model's config"
_BALANCE = "experts are balanced by the model's own auxiliary loss, such as router_aux_loss_coef of its config"
_COMPILE = "compilation is the caller's; use torch.compile on the model"
_COMPILED_BY_CALLER = (
    "the caller compiles, with the same results: TrainingArguments(torch_compile=True), or torch.compile(model) before "
    "the model is prepared"
)
_PRINTS = "it only prints; training is the same"
_COMET = (
    'nothing is sent to Comet; use Trainer(logger=CometLogger()) or Accelerator(log_with="comet_ml"), or in a script '
    "tensorboard, wandb or csv_monitor, which are carried out"
)
_STORED = "checkpoints have one format here, which is written by all ranks at once"

_PARALLEL: dict[str, Key | Group] = {
    "pipeline": Group(
        {
            "stages": translated(INT, "auto", "pipeline.stages", "must be the PipelineModule's num_stages", auto=True),
            "partition": translated(
                TEXT, "best", "pipeline.partition", "for layers that are divided by the config; " + _MODULE
            ),
            "seed_layers": unneeded(BOOL, False, _MODULE),
            "activation_checkpoint_interval": translated(
                INT, 0, "PipelineModule(activation_checkpoint_interval)", "wins over the module's own, unless it is 0"
            ),
            "pipe_partitioned": unneeded(BOOL, True, _UNDIVIDED),
            "grad_partitioned": unneeded(BOOL, True, _UNDIVIDED),
            "use_reentrant": translated(
                BOOL, True, "PipelineModule(activation_checkpoint_func)", "false is non_reentrant_checkpoint"
            ),
        }
    ),
    "activation_checkpointing": Group(
        {
            "partition_activations": translated(BOOL, False, "checkpointing.configure", _RECOMPUTED),
            "number_checkpoints": translated(INT, None, "checkpointing.configure(num_checkpoints)", _RECOMPUTED),
            "contiguous_memory_optimization": translated(
                BOOL, False, "checkpointing.configure(contiguous_checkpointing)", _RECOMPUTED
            ),
            "cpu_checkpointing": translated(BOOL, False, "checkpointing.configure(checkpoint_in_cpu)", _RECOMPUTED),
            "synchronize_checkpoint_boundary": translated(
                BOOL, False, "checkpointing.configure(synchronize)", _RECOMPUTED
            ),
            "profile": translated(BOOL, False, "checkpointing.configure", _RECOMPUTED),
        }
    ),
    "tensor_parallel": Group(
        {
            "autotp_size": translated(INT, 0, "mesh.tensor", "by the model's tp_plan"),
            "dtype": unneeded(ANY, None, "layers are divided in the dtype that they have"),
            "tp_overlap_comm": unneeded(ANY, None, "what ranks send each other for a layer is torch's own"),
            "partition_config": refused(ANY, None, _PLANS),
            "preset_model": refused(ANY, None, _PLANS),
        },
        switch="autotp_size",
        open=True,
    ),
    "expert_parallel": carried_out(
        "mesh.expert",
        {
            "autoep_size": translated(INT, 1, "mesh.expert", "among neighbouring ranks, at every stage"),
            "expert_tensor_parallel_size": refused(INT, 1, "ranks have whole experts; leave it at 1"),
            **plain_keys(
                "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3 "
                "num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern",
                _WHERE_EXPERTS,
            ),
            **plain_keys(
                "use_grouped_mm grouped_mm_backend disable_triton_grouped_mm combine_impl row_weighting_impl "
                "gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank async_split_plan "
                "validate_folding_routing",
                _EXPERTS_COMPUTE,
            ),
            **{name: refused(ANY, "auto", _ROUTER) for name in ("top_k", "score_func", "score_apply")},
            "routed_scaling_factor": refused(ANY, "auto", _ROUTER),
            "route_norm": refused(BOOL, None, _ROUTER),
            "route_scale": refused(NUMBER, 1.0, _ROUTER),
            "num_expert_groups": refused(INT, None, _ROUTER),
            "num_limited_groups": refused(INT, None, _ROUTER),
            "expert_activation": refused(TEXT, None, "experts compute by the model's own forward; change that"),
            "load_balance_coeff": refused(NUMBER, None, _BALANCE),
        },
    ),
    "sequence_parallel_size": translated(INT, 1, "mesh.sequence", "by Ulysses: mesh.ulysses has the same size"),
    "use_data_before_expert_parallelism": unneeded(
        BOOL, False, "neighbouring ranks divide experts; only which ranks have the same ones differs"
    ),
    "hybrid_engine": switched(
        "generating with kernels of its own is not done here; generate with the model itself",
        plain_keys(
            "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
            "enable_cuda_graph",
            "the hybrid engine is off",
        ),
    ),
    "compile": Group(
        {
            "deepcompile": refused(BOOL, False, _COMPILE),
            **plain_keys(
                "free_activation free_activation_threshold offload_activation offload_activation_pin_memory "
                "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
                "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
                "keep_all_input_tensors passes autoep_non_moe",
                "DeepCompile is off",
            ),
            **{
                name: Key(ANY, WITHOUT_EFFECT, None, _COMPILED_BY_CALLER, switched=False)
                for name in ("enabled", "disable", "backend", "mode", "kwargs", "fullgraph", "dynamic")
            },
        },
        switch="deepcompile",
        note=_COMPILE,
    ),
    "graph_harvesting": refused(BOOL, False, "CUDA graphs are the caller's; use torch.compile(mode='reduce-overhead')"),
    "disable_python_gc": unneeded(BOOL, False, "only the time of Python's collections differs; gc.disable() is yours"),
    "vocabulary_size": unneeded(INT, None, "checkpoints record the shape of every parameter"),
}

_CHECKPOINTS: dict[str, Key | Group] = {
    "checkpoint": Group(
        {
            "tag_validation": unneeded(("Warn", "Ignore", "Fail"), "Warn", "all ranks agree on the tag, or all raise"),
            "load_universal": unneeded(BOOL, False, "loading finds out which format a checkpoint has"),
            "use_node_local_storage": translated(BOOL, False, "checkpoint.layout", "true is pieces"),
            "parallel_write": Group({"pipeline_stage": unneeded(BOOL, False, _STORED)}),
            "checkpoint_serialization": unneeded(BOOL, True, _STORED),
            "writer": Group(
                plain_keys(
                    "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
                    _STORED + "; saves in the background are checkpoint.asynchronous",
                )
            ),
        }
    ),
    "nebula": switched("Azure's service is not used; checkpoint.asynchronous saves in the background", open=True),
    "datastates_ckpt": refused(MAPPING, None, "checkpoint.asynchronous saves in the background"),
    "aio": AIO,
}

_MONITOR = "this logger is off"
_WRITTEN = "loss, learning rate and loss scale of each step, written on rank 0"
_TEXT_OF = translated(TEXT, None, "the same")
_JOB = translated(TEXT, "DeepSpeedJobName", "a folder of output_path")
_PROJECT = translated(TEXT, "deepspeed", "the same")
_LOGGING: dict[str, Key | Group] = {
    "steps_per_print": unneeded(NUMBER, None, _PRINTS),
    "dump_state": unneeded(BOOL, False, _PRINTS),
    "wall_clock_breakdown": unneeded(BOOL, False, _PRINTS),
    "memory_breakdown": unneeded(BOOL, False, _PRINTS),
    "log_level": unneeded(TEXT, None, _PRINTS),
    "timers": Group(
        {"throughput": Group({"enabled": unneeded(BOOL, True, _PRINTS), "synchronized": unneeded(BOOL, True, _PRINTS)})}
    ),
    "tensorboard": carried_out(_WRITTEN, {"output_path": _TEXT_OF, "job_name": _JOB}),
    "wandb": carried_out(_WRITTEN, {"group": _TEXT_OF, "team": _TEXT_OF, "project": _PROJECT}),
    "csv_monitor": carried_out(_WRITTEN, {"output_path": _TEXT_OF, "job_name": _JOB}),
    "comet": switched(
        _COMET,
        plain_keys(
            "samples_log_interval project workspace api_key experiment_name experiment_key online mode", _MONITOR
        ),
    ),
    "comms_logger": carried_out(
        "a log of engine.counters",
        {
            "verbose": translated(BOOL, False, "a line for each step"),
            "prof_all": translated(BOOL, True, "all kinds of messages"),
            "prof_ops": translated(LIST, [], "kinds of messages, without prof_all"),
            "debug": unneeded(BOOL, False, "messages bear no names of functions"),
        },
    ),
    "flops_profiler": carried_out(
        "a profile of the forward on rank 0",
        {
            "recompute_fwd_factor": translated(NUMBER, 0.0, "forwards that are computed again in backward"),
            "profile_step": translated(INT, 1, "the step, counted from 0"),
            "module_depth": translated(INT, -1, "of the modules that are listed; -1 is the deepest"),
            "top_modules": translated(INT, 1, "modules that are listed at each depth"),
            "detailed": translated(BOOL, True, "a line for each module"),
            "output_file": translated(TEXT, None, "a file in place of standard output"),
        },
    ),
}

_AUTOTUNING = (
    "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric tuner_type tuner_early_stopping "
    "tuner_num_trials arg_mappings mp_size max_train_batch_size min_train_batch_size "
    "max_train_micro_batch_size_per_gpu "
    "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes model_info metric_path model_info_path"
)
_ELASTICITY = (
    "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch "
    "ignore_non_elastic_batch_info version num_gpus_per_node model_parallel_size"
)
_TOOLS: dict[str, Key | Group] = {
    "autotuning": switched(
        "no settings are searched for; benchmark the few that matter: stage, micro-batch, prefetch",
        plain_keys(_AUTOTUNING, "it is off"),
    ),
    "elasticity": switched(
        "the batch size is never changed with the number of ranks; a checkpoint resumes at any number of ranks",
        plain_keys(_ELASTICITY, "it is off"),
    ),
    "data_efficiency": switched(
        "the data loader is yours; order or shorten samples in the data set",
        plain_keys("seed data_sampling data_routing", "it is off"),
    ),
    "curriculum_learning": switched("the data loader is yours; order samples in the data set", open=True),
    "compression_training": refused(MAPPING, None, "weights are not compressed in training; use torch.ao"),
    "quantize_training": switched("weights are not quantised in training; use torch.ao", open=True),
    "weight_quantization": refused(MAPPING, None, "weights are not quantised in training; use torch.ao"),
    "eigenvalue": switched("it only serves quantised training, which is not done here", open=True),
    "progressive_layer_drop": switched(
        "layers are dropped by the model; do so in its forward", plain_keys("theta gamma", "it is off")
    ),
    "sparse_attention": refused(
        MAPPING, None, "attention is the model's; use scaled_dot_product_attention or flex_attention of torch.nn"
    ),
    "deepspeed_defaults": translated(TEXT, DEFAULTS_VERSION, "this reader's defaults"),
}

OBSERVERS = ("tensorboard", "wandb", "csv_monitor", "comms_logger", "flops_profiler")
"""Sections that are carried out by `zero_strategy.diagnostics`."""

ROOT = Group(
    {"zero_optimization": ZERO, **TRAINING, **PRECISION, **_PARALLEL, **_CHECKPOINTS, **_LOGGING, **_TOOLS},
    spellings={
        "bfloat16": "bf16",
        # In the documentation of DeepSpeed 0.3 this is what one GPU processes in one forward and backward pass.
        "train_step_batch_size": "train_micro_batch_size_per_gpu",
    },
)
"""Every key of the JSON."""

TOP_LEVEL = frozenset(ROOT.keys) | frozenset(ROOT.spellings)
"""The names at the top level, all spellings."""
