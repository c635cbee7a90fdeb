"""DeepSpeed's keys for ZeRO itself, precision, batch, gradients, optimizer and scheduler."""

from __future__ import annotations

import sys

from .keys import (
    ANY,
    BOOL,
    FLAG,
    INT,
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    Group,
    Key,
    plain_keys,
    refused,
    switched,
    translated,
    unneeded,
)

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
        "buffer_count": unneeded(INT, 5, _STAGING),
        "buffer_size": unneeded(INT, 10**8, _STAGING),
        "max_in_cpu": translated(INT, MAX_IN_CPU, "offload.resident_bytes", "its elements, in bytes"),
        "pin_memory": unneeded(BOOL, True, _PINNED),
    },
    switch="device",
)
_OPTIMIZER_OFFLOAD = Group(
    {
        "device": translated(_DEVICES, "none", "offload.optimizer", auto=True),
        "nvme_path": translated(TEXT, None, "offload.nvme_path", auto=True),
        "buffer_count": unneeded(INT, 4, _STAGING),
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
    "stage3_max_live_parameters": unneeded(INT, 10**9, _LIVE),
    "stage3_max_reuse_distance": unneeded(INT, 10**9, _LIVE),
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
        "sub_group_size": unneeded(INT, 10**9, "fused steps need no temporary copy that it would bound"),
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
            BOOL, False, "Muon is not supported: it needs whole matrices; use AdamW"
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
        "consecutive_hysteresis": refused(
            BOOL, False, "overflows that are tolerated are counted anew when the scale grows, not at each good step"
        ),
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
_AUTOCAST = (
    "autocast is the framework's; set Trainer(precision=\"bf16-mixed\") or Accelerator(mixed_precision=\"bf16\"), or "
    "wrap the forward in torch.autocast"
)

PRECISION: dict[str, Key | Group] = {
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": switched(_AUTOCAST, plain_keys("dtype lower_precision_safe_modules", _AUTOCAST)),
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
    "seq_parallel_communication_data_type": unneeded(_DTYPES, "fp32", "there is no sequence parallelism to send for"),
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
    "scheduler": Group(
        {"type": translated(TEXT, None, "scheduler"), "params": translated(MAPPING, None, "scheduler")}
    ),
    "zero_allow_untested_optimizer": unneeded(
        FLAG, False, "whether an optimizer can run on slices is checked; see elementwise_optimizers"
    ),
    "zero_force_ds_cpu_optimizer": unneeded(BOOL, True, "any elementwise optimizer is taken"),
    "dataloader_drop_last": translated(BOOL, False, "DataLoader(drop_last=...)"),
}
