"""DeepSpeed's keys for parallelism, checkpoints, logging and tools, and the table of all keys."""

from __future__ import annotations

from .keys import (
    BOOL,
    INT,
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    Group,
    Key,
    carried_out,
    plain_keys,
    refused,
    switched,
    translated,
    unneeded,
)
from .training_keys import AIO, PRECISION, TRAINING, ZERO

DEFAULTS_VERSION = "0.19.8"
"""The DeepSpeed version whose defaults are followed."""

_MODULE = "DeepSpeed does not look at it: the PipelineModule says it by its argument"
_UNDIVIDED = "only how tensor-parallel ranks share a message between stages differs; what arrives is the same"
_RECOMPUTED = "for what the model gives to deepspeed.checkpointing.checkpoint"
_TENSOR = (
    "layers are not divided by the config; divide them with torch's parallelize_module, whose DTensors are trained at "
    "every stage, or use stage 3 over all ranks"
)
_EXPERTS = "expert parallelism (mixture of experts) is not supported; experts are trained as ordinary parameters"
_SEQUENCE = "sequence parallelism is not supported; keep sequences whole on each rank"
_COMPILE = "compilation is the caller's; use torch.compile on the model"
_PRINTS = "it only prints; training is the same"
_COMET = (
    "nothing is sent to Comet; use Trainer(logger=CometLogger()) or Accelerator(log_with=\"comet_ml\"), or in a script "
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
            "cpu_checkpointing": translated(
                BOOL, False, "checkpointing.configure(checkpoint_in_cpu)", _RECOMPUTED
            ),
            "synchronize_checkpoint_boundary": translated(
                BOOL, False, "checkpointing.configure(synchronize)", _RECOMPUTED
            ),
            "profile": translated(BOOL, False, "checkpointing.configure", _RECOMPUTED),
        }
    ),
    "tensor_parallel": Group(
        {
            "autotp_size": refused(INT, 0, _TENSOR),
            **plain_keys("dtype tp_overlap_comm partition_config preset_model", _TENSOR),
        },
        switch="autotp_size",
        note=_TENSOR,
        open=True,
    ),
    "expert_parallel": switched(_EXPERTS, open=True),
    "sequence_parallel_size": refused(INT, 1, _SEQUENCE),
    "use_data_before_expert_parallelism": refused(BOOL, False, _EXPERTS),
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
