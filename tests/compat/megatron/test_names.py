"""The modules that Megatron's scripts import from: what is where, and what is a state's."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero_strategy.compat.megatron as megatron
from tests.comm.pretended import pretend
from zero_strategy.activation.rng import DEFAULT_NAME
from zero_strategy.compat.megatron import core_utils, fsdp_utils
from zero_strategy.compat.megatron import lifecycle as versions
from zero_strategy.compat.megatron.core_utils import UtilityState


def test_the_package_has_all_names_of_both_modules() -> None:
    for module in (fsdp_utils, core_utils):
        for name in module.__all__:
            assert getattr(megatron, name) is not None and name in dir(megatron)
            assert getattr(module, name) is getattr(module, name)
    assert megatron.core_utils is core_utils and megatron.is_te_min_version is core_utils.is_te_min_version
    with pytest.raises(AttributeError, match="has no attribute 'parallel_state'"):
        getattr(megatron, "parallel_state")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from zero_strategy.compat.megatron import no_such_name")
    later = {"StragglerDetector", "_StragglerData", "_ValueWithRank", "__straggler__"}
    assert later | {"check_param_hashes_across_dp_replicas"} <= set(dir(megatron))


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, zero_strategy.compat.megatron; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_globals_of_the_original_are_read_off_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENABLE_EXPERIMENTAL", raising=False)
    assert core_utils.ENABLE_EXPERIMENTAL is False
    monkeypatch.setenv("ENABLE_EXPERIMENTAL", "1")
    assert core_utils.ENABLE_EXPERIMENTAL is True
    assert core_utils._nvtx_enabled is False and core_utils._nvtx_range_messages == []
    core_utils.configure_nvtx_profiling(True)
    try:
        core_utils.nvtx_range_push("one")
        core_utils.nvtx_range_push()
        here = f"{__name__}.test_globals_of_the_original_are_read_off_the_state"
        assert core_utils._nvtx_enabled is True and core_utils._nvtx_range_messages == ["one", here]
        core_utils.nvtx_range_pop()
        core_utils.nvtx_range_pop("one")
    finally:
        core_utils.configure_nvtx_profiling(False)
    assert core_utils._te_version == versions.get_te_version()
    assert core_utils._fa_version == versions.get_fa_version()
    assert core_utils._mamba_ssm_version == versions.get_mamba_version()
    assert core_utils._causal_conv1d_version == versions.get_causal_conv1d_version()
    assert core_utils._ASYNC_IO_LOOP is None and core_utils._ASYNC_TASK_STATS == {}
    assert core_utils.logger.name == core_utils.__name__ and fsdp_utils.logger.name == fsdp_utils.__name__


def test_figures_of_ranks_are_compared_by_value() -> None:
    low, high, unknown = (megatron._ValueWithRank(*given) for given in ((1.5, 3, "ms"), (2.0, 0), (None, None)))
    assert low < high and high > low and not high < low and not low > high
    assert not any((low < unknown, unknown < low, low > unknown, unknown > low))
    assert low() == (1.5, 3, "ms") and "1.5" in str(low) and "3" in str(low)
    assert megatron.StragglerDetector() is megatron.__straggler__ is core_utils.__straggler__


def test_one_scratch_buffer_is_the_process_s() -> None:
    buffer = fsdp_utils.get_global_memory_buffer()
    assert buffer is megatron.get_global_memory_buffer() and isinstance(buffer, core_utils.GlobalMemoryBuffer)
    assert buffer.get_tensor((2, 2), torch.float32, "test_names").shape == (2, 2)
    buffer.clear()


def test_the_fsdp_page_has_the_random_states_of_the_other_faces() -> None:
    assert fsdp_utils._MODEL_PARALLEL_RNG_TRACKER_NAME == DEFAULT_NAME == "model-parallel-rng"
    before = fsdp_utils._get_cuda_rng_state()
    fsdp_utils._set_cuda_rng_state(before)
    assert fsdp_utils.is_te_min_version(vers="0.1") is core_utils.is_te_min_version(version="0.1")


def test_a_state_has_groups_of_its_own() -> None:
    state, other = UtilityState(), UtilityState()
    with pretend(3, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        state.set_parallel_groups(mesh)
        assert dist.get_process_group_ranks(state.get_parallel_groups().context) == [1, 3]  # type: ignore[arg-type]
        batch = {"tokens": torch.arange(8).reshape(1, 8)}
        assert state.get_batch_on_this_cp_rank(batch)["tokens"].tolist() == [[2, 3, 4, 5]]
        assert torch.equal(other.get_batch_on_this_cp_rank(batch)["tokens"], batch["tokens"])
        part = torch.zeros(3, 4)
        described = state.make_tp_sharded_tensor_for_checkpoint(part, "w")
        assert described.global_shape == (6, 4) and described.replica_id == (0, 0, 1)
        assert state.make_sharded_tensor_for_checkpoint(part, "w").replica_id == (0, 1, 1)
        assert other.make_tp_sharded_tensor_for_checkpoint(part, "w").global_shape == (3, 4)
        lines = list[tuple[object, ...]]()
        logger = SimpleNamespace(log=lambda *args: lines.append(args), isEnabledFor=lambda level: True)
        state.log_on_each_pipeline_stage(logger, 20, "not the first of its stage")  # type: ignore[arg-type]
        other.log_on_each_pipeline_stage(logger, 20, "knows of no groups")  # type: ignore[arg-type]
        assert lines == [(20, "knows of no groups")]
    assert megatron.get_parallel_groups().tensor is None
