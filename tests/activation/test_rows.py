"""Every row of the reference documents on activation checkpointing and random states, with the test that holds it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROWS = {
    "set_random_seed": "test_deepspeed_names.test_set_random_seed_is_that_of_python_numpy_and_torch",
    "set_random_seed: Python random, numpy and torch": "test_rng.test_set_random_seed_seeds_python_numpy_and_torch",
    "checkpointing.configure(...)": "test_deepspeed_names.test_configure_sets_what_it_is_given",
    "configure: mpu_": "test_deepspeed_names.test_configure_mpu_says_where_this_process_is",
    "configure: num_checkpoints": (
        "test_kept_inputs.test_the_contiguous_buffer_is_num_checkpoints_inputs_and_nothing_else"
    ),
    "configure: deepspeed_config (path to JSON); explicit arguments override it": (
        "test_deepspeed_names.test_configure_reads_the_path_of_a_json"
    ),
    "configure: partition_activations": (
        "test_on_ranks.test_each_of_two_ranks_keeps_half_of_an_input_and_gathers_it_in_backward"
    ),
    "configure: contiguous_checkpointing": (
        "test_kept_inputs.test_the_contiguous_buffer_is_num_checkpoints_inputs_and_nothing_else"
    ),
    "contiguous: homogeneous checkpoints only": (
        "test_kept_inputs.test_inputs_in_the_contiguous_buffer_are_of_one_kind_at_a_time"
    ),
    "contiguous: needs partition_activations": (
        "test_deepspeed_names.test_what_cannot_be_configured_is_refused_and_changes_nothing"
    ),
    "configure: checkpoint_in_cpu": (
        "test_kept_inputs.test_inputs_on_the_host_are_fetched_one_layer_ahead_and_their_memory_is_used_again"
    ),
    "checkpoint_in_cpu: only with partition_activations": (
        "test_deepspeed_names.test_checkpoint_in_cpu_moves_what_a_rank_keeps_with_partition_activations_and_without"
    ),
    "configure: synchronize": "test_checkpoint.test_bits_are_those_without_checkpoints",
    "configure: profile": "test_checkpoint.test_profile_counts_each_forward_and_backward_and_logs_them",
    "checkpointing.is_configured()": "test_deepspeed_names.test_configure_sets_what_it_is_given",
    "checkpointing.checkpoint(function, *args)": "test_checkpoint.test_bits_are_those_without_checkpoints",
    "checkpoint(): semantics of torch.utils.checkpoint": (
        "test_deepspeed_names.test_checkpoint_has_the_semantics_of_torch_and_so_have_its_other_forms"
    ),
    "checkpointing.reset()": "test_kept_inputs.test_reset_lets_forwards_follow_each_other_without_a_backward",
    "reset(): clears contiguous buffers between forwards without backward": (
        "test_deepspeed_names.test_reset_clears_contiguous_buffers_between_forwards_without_backward"
    ),
    "checkpointing.get_cuda_rng_tracker()": "test_rng.test_initialize_makes_a_tracker_once_and_anew_when_forced",
    "checkpointing.model_parallel_cuda_manual_seed(seed)": (
        "test_rng.test_model_parallel_cuda_manual_seed_replaces_the_device_s_own"
    ),
    "model_parallel_cuda_manual_seed: after model-parallel set-up, replaces torch.cuda.manual_seed": (
        "test_on_ranks.test_each_of_two_ranks_keeps_half_of_an_input_and_gathers_it_in_backward"
    ),
    "RNG: default state": (
        "test_rng.test_the_default_state_is_that_of_a_group_and_the_model_parallel_state_that_of_a_place"
    ),
    "RNG: model-parallel state": (
        "test_rng.test_the_default_state_is_that_of_a_group_and_the_model_parallel_state_that_of_a_place"
    ),
    "checkpointing.CudaRNGStatesTracker (the name itself)": (
        "test_deepspeed_names.test_both_module_paths_have_the_same_names"
    ),
    "CudaRNGStatesTracker.add": "test_rng.test_wrong_use_is_refused_by_name",
    "CudaRNGStatesTracker.fork": "test_rng.test_forks_nest",
    "checkpointing.CheckpointFunction": (
        "test_deepspeed_names.test_checkpoint_has_the_semantics_of_torch_and_so_have_its_other_forms"
    ),
    "CheckpointFunction: model-parallel tracker states set and reset around recomputation": (
        "test_deepspeed_names.test_checkpoint_function_tracks_the_states_of_the_model_parallel_tracker"
    ),
    "CheckpointFunction: partitioning, contiguous memory, CPU, profiling": (
        "test_on_ranks.test_each_of_two_ranks_keeps_half_of_an_input_and_gathers_it_in_backward"
    ),
    "_get_cuda_rng_state(device='cuda', clone=False, graph_safe=False)": (
        "test_rng.test_raw_states_are_got_and_set_without_a_copy_and_without_cuda"
    ),
    "_set_cuda_rng_state(new_state, device=-1, graph_safe=False)": (
        "test_rng.test_raw_states_are_got_and_set_without_a_copy_and_without_cuda"
    ),
    "initialize_rng_tracker(...)": "test_rng.test_initialize_makes_a_tracker_once_and_anew_when_forced",
    "get_cuda_rng_tracker(...)": "test_rng.test_initialize_makes_a_tracker_once_and_anew_when_forced",
    "rng tracker: use_cudagraphable_rng": "test_rng.test_flags_ask_for_the_graph_safe_form",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_s_test_is_there(row: str) -> None:
    module, name = ROWS[row].split(".")
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
